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

KERNEL vec keep(ints mask, vec value) { return (vec)(mask & (ints)value); }
KERNEL vec choose(ints mask, vec yes, vec no) { return (vec)((mask & (ints)yes) | (~mask & (ints)no)); }

/* Loads a value once for several products; GCC would read it from memory for each of them. */
#if defined(__AVX512F__)
#define IN_REGISTER(value) __asm__("" : "+v"(value))
#elif defined(__SSE__)
#define IN_REGISTER(value) __asm__("" : "+x"(value))
#else
#define IN_REGISTER(value)
#endif

/* The lanes whose bit is set, the first lane's being the lowest. */
KERNEL ints lanes_of(uint64_t bits)
{
    ints lane;
    UNROLL
    for (int i = 0; i < LANES; i++)
        lane[i] = 1 << i;
    return ((int32_t)bits & lane) != 0;
}

/* One bit for each lane whose mask is set, the first lane's lowest. */
KERNEL uint64_t bits_of(ints mask)
{
#if defined(__AVX512F__)
    return _mm512_cmplt_epi32_mask((__m512i)mask, _mm512_setzero_si512());
#elif defined(__AVX__)
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

/* The lanes of `value`, turned by `n` places. */
#if LANES == 16
#define TURN(n) n, n + 1, n + 2, n + 3, n + 4, n + 5, n + 6, n + 7, (n + 8) % 16, (n + 9) % 16, (n + 10) % 16, \
                (n + 11) % 16, (n + 12) % 16, (n + 13) % 16, (n + 14) % 16, (n + 15) % 16
#elif LANES == 8
#define TURN(n) n, n + 1, n + 2, n + 3, (n + 4) % 8, (n + 5) % 8, (n + 6) % 8, (n + 7) % 8
#else
#define TURN(n) n, n + 1, (n + 2) % 4, (n + 3) % 4
#endif
#if defined(__clang__)
#define TURNED(value, n) __builtin_shufflevector(value, value, TURN(n))
#else
#define TURNED(value, n) __builtin_shuffle(value, (ints){TURN(n)})
#endif

KERNEL float sum_lanes(vec value)
{
#if LANES == 16
    value += TURNED(value, 8);
#endif
#if LANES >= 8
    value += TURNED(value, 4);
#endif
    value += TURNED(value, 2);
    value += TURNED(value, 1);
    return value[0];
}
