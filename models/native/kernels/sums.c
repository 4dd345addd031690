/* Exact sums of float32 vectors: each value times a scale, rounded half to even, added to a 64-bit whole number.
 *
 * value * scale is exact in double: 24 bits times the at most 23 of a scale. Below 2^51 the rounding is an addition:
 * the double 1.5 * 2^52 + x has the nearest whole number to x in its low bits, and every processor's vector unit can
 * do that; conversions of doubles to 64-bit integers few can. Larger values, which are rare, take llrint.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Values as they lie in an update, behind a header of any length. */
typedef float any_float __attribute__((aligned(1)));

#define LANES 256
#define PIECE 1024 /* values of a masked update that are spread out at a time: in the first cache */

static inline uint32_t magnitude_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits & 0x7fffffff;
}

/* The largest magnitude as the bits of a float32. A NaN is larger than infinity in this order. */
uint32_t largest_bits(const any_float *restrict values, size_t size)
{
    uint32_t largest = 0;
    for (size_t i = 0; i < size; i++) {
        const uint32_t bits = magnitude_bits(values[i]);
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* The sum of the squares in LANES running sums, one value each in turn: an order that NumPy can follow as well.
 * Returns what `largest_bits` does. Lanes of a piece stay in the first cache, and so does the piece.
 */
uint32_t measure(double *restrict lanes, const any_float *restrict values, size_t size)
{
    uint32_t largest = 0;
    size_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        for (size_t j = 0; j < LANES; j++) {
            const uint32_t bits = magnitude_bits(values[i + j]);
            largest = bits > largest ? bits : largest;
        }
        for (size_t j = 0; j < LANES; j++)
            lanes[j] += (double)values[i + j] * (double)values[i + j];
    }
    for (size_t j = 0; i + j < size; j++) {
        const uint32_t bits = magnitude_bits(values[i + j]);
        largest = bits > largest ? bits : largest;
        lanes[j] += (double)values[i + j] * (double)values[i + j];
    }
    return largest;
}

static inline int64_t as_bits(double value)
{
    int64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* `is_small`: no value times `scale` reaches 2^51. */
void add_scaled(int64_t *restrict sums, const any_float *restrict values, size_t size, double scale, int is_small)
{
    const double shift = 6755399441055744.0; /* 1.5 * 2^52 */
    if (is_small)
        for (size_t i = 0; i < size; i++)
            sums[i] += as_bits((double)values[i] * scale + shift) - as_bits(shift);
    else
        for (size_t i = 0; i < size; i++)
            sums[i] += llrint((double)values[i] * scale);
}

/* Spreads out `values [count]` to where `shared` is 1, zeros elsewhere; returns how many it took. */
static size_t spread(float *restrict dense, const uint8_t *restrict shared, size_t size, const any_float *restrict values,
                     size_t count)
{
    size_t taken = 0, i = 0;
    for (; i + 8 <= size && taken + 8 <= count; i += 8) {
        uint64_t eight;
        memcpy(&eight, shared + i, sizeof eight);
        if (eight == 0x0101010101010101u) {
            memcpy(dense + i, values + taken, 8 * sizeof(float));
            taken += 8;
        } else
            for (size_t j = i; j < i + 8; j++) { /* without a branch: masks are random to a processor */
                uint32_t bits;
                memcpy(&bits, values + taken, sizeof bits);
                bits &= -(uint32_t)shared[j];
                memcpy(dense + j, &bits, sizeof bits);
                taken += shared[j];
            }
    }
    for (; i < size; i++)
        dense[i] = shared[i] ? values[taken++] : 0.0f;
    return taken;
}

/* As `add_scaled` for `values [count]` of the entries where `shared` is 1, which are counted too. */
void add_scaled_shared(int64_t *restrict sums, int32_t *restrict counts, const any_float *restrict values, size_t count,
                       const uint8_t *restrict shared, size_t size, double scale, int is_small)
{
    float dense[PIECE];
    for (size_t start = 0; start < size; start += PIECE) {
        const size_t length = size - start < PIECE ? size - start : PIECE;
        const size_t taken = spread(dense, shared + start, length, values, count);
        values += taken;
        count -= taken;
        add_scaled(sums + start, dense, length, scale, is_small);
        for (size_t i = 0; i < length; i++)
            counts[start + i] += shared[start + i];
    }
}
