/* The words of NumPy's Philox generator and the standard normal values that NumPy makes of them, to the last bit.
 *
 * Philox4x64-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Normal values:
 * Marsaglia, Tsang, "The ziggurat method for generating random variables", 2000, with 256 layers. NumPy calls a
 * function for each word; here both are one loop. `ziggurat.h` stands before this file. Compiled without contraction,
 * since NumPy rounds each operation.
 */
#include <math.h>
#include <stddef.h>

#define ROUNDS 10
#define WORDS 64

typedef struct {
    uint64_t key[2];
    uint64_t counter;
    uint64_t taken; /* of `words` */
    uint64_t words[WORDS];
} Stream;

size_t stream_bytes(void) { return sizeof(Stream); }

void begin(Stream *stream, const uint64_t *key)
{
    stream->key[0] = key[0];
    stream->key[1] = key[1];
    stream->counter = 0;
    stream->taken = WORDS;
}

static void draw_words(Stream *stream)
{
    for (size_t first = 0; first < WORDS; first += 4) {
        uint64_t a = ++stream->counter, b = 0, c = 0, d = 0, key_0 = stream->key[0], key_1 = stream->key[1];
        for (int round = 0; round < ROUNDS; round++) {
            const unsigned __int128 left = (unsigned __int128)0xD2E7470EE14C6C93 * a;
            const unsigned __int128 right = (unsigned __int128)0xCA5A826395121157 * c;
            a = (uint64_t)(right >> 64) ^ b ^ key_0;
            c = (uint64_t)(left >> 64) ^ d ^ key_1;
            b = (uint64_t)right;
            d = (uint64_t)left;
            key_0 += 0x9E3779B97F4A7C15;
            key_1 += 0xBB67AE8584CAA73B;
        }
        stream->words[first] = a;
        stream->words[first + 1] = b;
        stream->words[first + 2] = c;
        stream->words[first + 3] = d;
    }
    stream->taken = 0;
}

static inline uint64_t next(Stream *stream)
{
    if (stream->taken == WORDS)
        draw_words(stream);
    return stream->words[stream->taken++];
}

/* Uniform in [0, 1). */
static double next_uniform(Stream *stream) { return (double)(next(stream) >> 11) * 0x1p-53; }

/* A value of the normal distribution's tail, beyond the widest layer. */
static double tail(Stream *stream, int negative)
{
    for (;;) {
        const double beyond = -TAIL_INVERSE * log1p(-next_uniform(stream));
        const double threshold = -log1p(-next_uniform(stream));
        if (threshold + threshold > beyond * beyond)
            return negative ? -(TAIL + beyond) : TAIL + beyond;
    }
}

static double next_normal(Stream *stream)
{
    for (;;) {
        const uint64_t word = next(stream);
        const unsigned layer = word & 0xff;
        const int sign = (word >> 8) & 1;
        const uint64_t place = (word >> 9) & 0xfffffffffffff;
        const double value = copysign((double)(int64_t)place * step[layer], 0.5 - sign);
        if (__builtin_expect(place < inside[layer], 1))
            return value;
        if (layer == 0)
            return tail(stream, (place >> 8) & 1); /* NumPy takes this bit for the sign */
        if ((height[layer - 1] - height[layer]) * next_uniform(stream) + height[layer] < exp(-0.5 * value * value))
            return value;
    }
}

void draw_normal(Stream *stream, double *out, size_t size)
{
    for (size_t i = 0; i < size; i++)
        out[i] = next_normal(stream);
}

void draw_raw(Stream *stream, uint64_t *out, size_t size)
{
    for (size_t i = 0; i < size; i++)
        out[i] = next(stream);
}
