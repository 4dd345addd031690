/* The words of NumPy's Philox generator, and the standard normal values that hushfleet/privacy/noise.py makes of them, to
 * the last bit.
 *
 * Philox4x64-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Compiled without
 * contraction, since NumPy rounds each operation.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define ROUNDS 10
#define PAIRS 64           /* of a group: as many values, twice */
#define DRAWN (2 * PAIRS)  /* values of a group; they take PAIRS words */

typedef struct {
    uint64_t key[2];
    uint64_t taken;  /* words */
    uint64_t given;  /* values of `group` */
    double group[DRAWN];
} Stream;

size_t stream_bytes(void) { return sizeof(Stream); }

void begin(Stream *streams, const uint64_t *keys, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        memcpy(streams[i].key, keys + 2 * i, sizeof streams[i].key);
        streams[i].taken = 0;
        streams[i].given = DRAWN;
    }
}

static inline void philox(const uint64_t *key, uint64_t counter, uint64_t *words)
{
    uint64_t a = counter, b = 0, c = 0, d = 0, key_0 = key[0], key_1 = key[1];
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
    words[0] = a;
    words[1] = b;
    words[2] = c;
    words[3] = d;
}

void draw_raw(Stream *stream, uint64_t *out, size_t size)
{
    uint64_t words[4];
    while (size) {
        const size_t from = stream->taken % 4, count = 4 - from < size ? 4 - from : size;
        philox(stream->key, stream->taken / 4 + 1, words);
        memcpy(out, words + from, count * sizeof *out);
        stream->taken += count;
        out += count;
        size -= count;
    }
}

static inline float minus_log(float x)
{
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits -= 0x3f3504f3; /* the root of 1/2 */
    const float exponent = (float)(bits >> 23);
    bits = (bits & 0x7fffff) + 0x3f3504f3;
    memcpy(&x, &bits, sizeof x);
    x -= 1;
    float log = 7.0376836292e-2f;
    log = log * x - 1.1514610310e-1f;
    log = log * x + 1.1676998740e-1f;
    log = log * x - 1.2420140846e-1f;
    log = log * x + 1.4249322787e-1f;
    log = log * x - 1.6668057665e-1f;
    log = log * x + 2.0000714765e-1f;
    log = log * x - 2.4999993993e-1f;
    log = log * x + 3.3333331174e-1f;
    log = log * x - 0.5f;
    log = log * x + 1;
    return -(log * x + exponent * 6.93147180559945286227e-1f);
}

static inline double signed_by(float value, uint32_t sign)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits ^= sign << 31;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void normals(const uint64_t *from, double *out)
{
    uint32_t words[DRAWN];
    for (int i = 0; i < PAIRS; i++) {
        words[2 * i] = (uint32_t)from[i];
        words[2 * i + 1] = (uint32_t)(from[i] >> 32);
    }
    for (int i = 0; i < PAIRS; i++) {
        const uint32_t turn = words[PAIRS + i];
        const float radius = sqrtf(minus_log(((float)(int32_t)(words[i] >> 1) + 0.5f) * 0x1p-31f));
        const float angle = (float)((int32_t)turn >> 2) * 1.46291807926715968105e-9f; /* pi / 4 * 2^-29 */
        const float square = angle * angle;
        float sine = -1.9515295891e-4f;
        sine = sine * square + 8.3321608736e-3f;
        sine = sine * square - 1.6666654611e-1f;
        sine = sine * square + 1;
        sine = sine * angle;
        const float cosine = sqrtf(1 - sine * sine);
        out[i] = signed_by((cosine - sine) * radius, turn);
        out[PAIRS + i] = signed_by((cosine + sine) * radius, turn >> 1);
    }
}

static void draw_group(Stream *stream, double *out)
{
    uint64_t words[PAIRS];
    if (stream->taken % 4)
        draw_raw(stream, words, PAIRS);
    else {
        for (int i = 0; i < PAIRS / 4; i++)
            philox(stream->key, stream->taken / 4 + 1 + i, words + 4 * i);
        stream->taken += PAIRS;
    }
    normals(words, out);
}

void draw_normal(Stream *stream, double *out, size_t size)
{
    while (size) {
        if (stream->given == DRAWN) {
            if (size >= DRAWN) {
                draw_group(stream, out);
                out += DRAWN;
                size -= DRAWN;
                continue;
            }
            draw_group(stream, stream->group);
            stream->given = 0;
        }
        const size_t left = DRAWN - stream->given, count = left < size ? left : size;
        memcpy(out, stream->group + stream->given, count * sizeof *out);
        stream->given += count;
        out += count;
        size -= count;
    }
}
