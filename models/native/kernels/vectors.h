/* Vectors as wide as the target's registers, in the vector language that GCC and Clang share.
 *
 * Every kernel is inlined into a caller that passes sizes as constants. So a tile of accumulators is an array
 * only in the text: its loops are unrolled, and it lives in registers.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define REGISTERS 32
#elif defined(__AVX__)
#define LANES 8
#define REGISTERS 16
#elif defined(__aarch64__)
#define LANES 4
#define REGISTERS 32
#else
#define LANES 4
#define REGISTERS 16
#endif

#if defined(__AVX__) || defined(__SSE__)
#include <immintrin.h>
#endif

#define KERNEL static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")
#define ALIGNED __attribute__((aligned(64)))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

KERNEL vec load(const float *from) { return *(const loose_vec *)from; }
KERNEL void store(float *to, vec value) { *(loose_vec *)to = value; }

/* A value in all lanes. GCC would load it and then spread it, in a unit that products need. */
KERNEL vec spread(const float *from)
{
#if defined(__AVX512F__)
    vec value;
    __asm__("vbroadcastss %1, %0" : "=v"(value) : "m"(*from));
    return value;
#elif defined(__AVX__)
    vec value;
    __asm__("vbroadcastss %1, %0" : "=x"(value) : "m"(*from));
    return value;
#else
    return *from - (vec){0};
#endif
}

/* Loads a value once for several products; GCC would read it from memory for each of them. */
#if defined(__AVX512F__)
#define IN_REGISTER(value) __asm__("" : "+v"(value))
#elif defined(__SSE__)
#define IN_REGISTER(value) __asm__("" : "+x"(value))
#else
#define IN_REGISTER(value)
#endif

/* Which lanes are so, one bit for each, the first lane's lowest; what these bits keep of a value; and the larger of two,
 * which is `b` if either is NaN. Processors have instructions for it that GCC does not find. */
#if defined(__AVX512F__)
KERNEL uint64_t bits_less(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
KERNEL uint64_t bits_equal(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
KERNEL vec keep(uint64_t bits, vec value) { return _mm512_maskz_mov_ps(bits, value); }
KERNEL vec larger(vec a, vec b) { return _mm512_max_ps(a, b); }
#else
KERNEL uint64_t bits_of(ints mask)
{
#if defined(__AVX__)
    return _mm256_movemask_ps((__m256)mask);
#elif defined(__SSE__)
    return _mm_movemask_ps((__m128)mask);
#else
    uint64_t bits = 0;
    UNROLL
    for (int lane = 0; lane < LANES; lane++)
        bits |= (uint64_t)(mask[lane] & 1) << lane;
    return bits;
#endif
}

KERNEL uint64_t bits_less(vec a, vec b) { return bits_of(a < b); }
KERNEL uint64_t bits_equal(vec a, vec b) { return bits_of(a == b); }

KERNEL vec keep(uint64_t bits, vec value)
{
    ints lane;
    UNROLL
    for (int i = 0; i < LANES; i++)
        lane[i] = 1 << i;
    return (vec)((((int32_t)bits & lane) != 0) & (ints)value);
}

KERNEL vec larger(vec a, vec b)
{
    const ints mask = a > b;
    return (vec)((mask & (ints)a) | (~mask & (ints)b));
}
#endif

#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif
#define PLACE(lane, h) ((lane) / (2 * (h)) * 2 * (h) + (lane) % (h) + (lane) / (h) % 2 * LANES)
#define FOUR(lane, h, skip) PLACE(lane, h) + skip, PLACE(lane + 1, h) + skip, PLACE(lane + 2, h) + skip, \
                            PLACE(lane + 3, h) + skip
#if LANES == 16
#define PLACES(h, skip) FOUR(0, h, skip), FOUR(4, h, skip), FOUR(8, h, skip), FOUR(12, h, skip)
#elif LANES == 8
#define PLACES(h, skip) FOUR(0, h, skip), FOUR(4, h, skip)
#else
#define PLACES(h, skip) FOUR(0, h, skip)
#endif
/* Adds the second `h` of each 2 * h lanes to the first: h vectors of both operands' sums are left of 2 * h vectors. */
#define FOLD(h)                                                                                                      \
    UNROLL                                                                                                           \
    for (int i = 0; i < h; i++)                                                                                      \
        v[i] = PICK(v[i], v[i + h], PLACES(h, 0)) + PICK(v[i], v[i + h], PLACES(h, h));

/* The sum of each of LANES vectors, which are overwritten: the first's in the first lane. */
KERNEL vec sums_of_lanes(vec *v)
{
#if LANES == 16
    FOLD(8)
#endif
#if LANES >= 8
    FOLD(4)
#endif
    FOLD(2)
    FOLD(1)
    return v[0];
}
