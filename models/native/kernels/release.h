/* An update's way from the training to the exact sum: hushfleet/privacy/{clipping,mechanism}.py,
 * hushfleet/wire/format/quantized.py and hushfleet/aggregator/payloads/{decoding,exact_sum}.py.
 *
 * Each line rounds where NumPy rounds, and sums go in NumPy's order, so the results are NumPy's to the last bit. A unit
 * of values passes all steps while it is in the cache. `noise.h` stands before this file.
 */

#define UNIT (1 << 15)   /* values; `decoding` squares as many at once */
#define BLOCK (1 << 20)  /* values; `clipping` squares as many at once */
#define PARTS 16         /* dither values that one counter of the generator gives */

typedef double doubles __attribute__((vector_size(64)));
typedef float floats __attribute__((vector_size(32), aligned(4), may_alias));

/* The sum of squares as NumPy adds an array of them: eight sums up to 128 values, by halves above. */
static double sum_of_squares(const float *values, size_t size)
{
    if (size > 128) {
        const size_t half = size / 2 - size / 2 % 8;
        return sum_of_squares(values, half) + sum_of_squares(values + half, size - half);
    }
    double sum = 0;
    size_t i = 0;
    if (size >= 8) {
        doubles eight = {0};
        for (; i + 8 <= size; i += 8) {
            const doubles wide = __builtin_convertvector(*(const floats *)(values + i), doubles);
            eight += wide * wide;
        }
        sum = ((eight[0] + eight[1]) + (eight[2] + eight[3])) + ((eight[4] + eight[5]) + (eight[6] + eight[7]));
    }
    for (; i < size; i++)
        sum += (double)values[i] * values[i];
    return sum;
}

/* The sums of squares of the parts of each client's vector that end at `stops`. */
void squares_of(const float *values, size_t size, size_t clients, const uint64_t *stops, size_t count, double *sums)
{
    for (; clients; clients--, values += size)
        for (size_t part = 0, first = 0; part < count; part++, sums++)
            for (*sums = 0; first < stops[part]; ) {
                const size_t left = stops[part] - first, some = left < BLOCK ? left : BLOCK;
                *sums += sum_of_squares(values + first, some);
                first += some;
            }
}

/* Facts of one layer. */
typedef struct {
    uint64_t stop;     /* of its entries in the vector */
    double deviation;  /* of the noise; 0: no noise */
    float factor;      /* of the clipping */
    float step;        /* of the quantisation; 0: values are sent as they are */
} Layer;

/* Dither values `first` and following of this key's stream; `first` is the first that one counter gives. */
static void draw_dither(const uint64_t *key, size_t first, size_t size, float *out)
{
    uint64_t words[UNIT / 4 + 4];
    uint16_t parts[UNIT + PARTS];
    for (size_t block = 0; block * PARTS < size; block++)
        philox(key, first / PARTS + block + 1, words + 4 * block);
    memcpy(parts, words, 2 * size);
    for (size_t i = 0; i < size; i++)
        out[i] = (float)parts[i] * 0x1p-16f - 65535 * 0x1p-17f;
}

static void clip_unit(float *values, size_t size, float factor)
{
    for (size_t i = 0; i < size; i++)
        values[i] *= factor;
}

static void noise_unit(Stream *noise, float *values, size_t size, double deviation)
{
    static const double SHIFT = 1.5 * 0x1p42;
    const double shift = deviation * SHIFT;
    double drawn[DRAWN];
    for (size_t first = 0; first < size; first += DRAWN) {
        const size_t count = size - first < DRAWN ? size - first : DRAWN;
        draw_normal(noise, drawn, count);
        for (size_t i = 0; i < count; i++)
            values[first + i] = (float)((drawn[i] * deviation + values[first + i]) + shift - shift);
    }
}

/* Quantises a unit, and keeps its first level and each `stride`-th one after that; returns how many. */
static size_t quantise_unit(const uint64_t *key, size_t first, float *values, size_t size, float step, size_t stride,
                            float *kept)
{
    float drawn[UNIT + PARTS], levels[UNIT];
    const size_t early = first % PARTS;
    draw_dither(key, first - early, size + early, drawn);
    const float *const dither = drawn + early;
    for (size_t i = 0; i < size; i++) {
        levels[i] = rintf(values[i] / step + dither[i]);
        values[i] = (levels[i] - dither[i]) * step;
    }
    size_t count = 0;
    for (size_t i = 0; i < size; i += stride)
        kept[count++] = levels[i];
    return count;
}

/* The largest magnitude: magnitudes are in the order of their bits. */
static float peak_of(const float *values, size_t size)
{
    int32_t most = 0;
    for (size_t i = 0; i < size; i++) {
        int32_t bits;
        memcpy(&bits, values + i, sizeof bits);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float peak;
    memcpy(&peak, &most, sizeof peak);
    return peak;
}

/* Releases an update of finite values: clips, noises, quantises and measures; the arguments are those of `release`. */
static void release_one(Stream *noise, const uint64_t *dither_key, const float *update, const uint8_t *mask,
                        const Layer *layers, size_t count, float *seen, size_t stride, float *levels, double *squares,
                        float *peaks)
{
    size_t at = 0, sent = 0;
    for (size_t l = 0; l < count; l++) {
        const Layer layer = layers[l];
        peaks[l] = 0;
        while (at < layer.stop) {
            float *const unit = seen + sent;
            size_t size = 0;
            if (mask) {
                for (; at < layer.stop && size < UNIT; at++) { /* no branch, since masks are often random */
                    unit[size] = update[at];
                    size += !mask[at];
                }
            } else {
                size = layer.stop - at < UNIT ? layer.stop - at : UNIT;
                memcpy(unit, update + at, size * sizeof *unit);
                at += size;
            }
            if (!size)
                break;
            if (layer.factor != 1)
                clip_unit(unit, size, layer.factor);
            if (layer.deviation != 0)
                noise_unit(noise, unit, size, layer.deviation);
            if (layer.step != 0)
                levels += quantise_unit(dither_key, sent, unit, size, layer.step, stride, levels);
            const float peak = peak_of(unit, size);
            peaks[l] = peak > peaks[l] ? peak : peaks[l];
            *squares++ = sum_of_squares(unit, size);
            sent += size;
        }
    }
}

/* Releases the updates of clients, one row of each array after the other.
 *
 * size     values of a vector
 * mask     1 where a value stays on the device, or NULL; the same for all
 * seen     `sent` values of each, those that do not stay; at the end there is memory for one more
 * levels   `kept` of each: of each unit its first quantised level and each `stride`-th one after that
 * squares  `units` of each: for each unit of the layers' sent values the sum of their squares
 * peaks    for each layer: the largest magnitude of a sent value
 */
void release(Stream *noises, const uint64_t *dither_keys, const float *updates, size_t size, size_t clients,
             const uint8_t *mask, const Layer *layers, size_t count, float *seen, size_t sent, size_t stride,
             float *levels, size_t kept, double *squares, size_t units, float *peaks)
{
    for (size_t c = 0; c < clients; c++)
        release_one(noises + c, dither_keys + 2 * c, updates + c * size, mask, layers + c * count, count,
                    seen + c * sent, stride, levels + c * kept, squares + c * units, peaks + c * count);
}

/* Adds rows of values times `scale`, rounded to whole numbers; none reaches 2^51. */
void add_scaled(int64_t *sums, const float *values, double scale, size_t size, size_t rows)
{
    static const double SHIFT = 1.5 * 0x1p52;
    for (; rows; rows--, values += size)
        for (size_t i = 0; i < size; i++) {
            const double shifted = values[i] * scale + SHIFT;
            int64_t bits;
            memcpy(&bits, &shifted, sizeof bits);
            sums[i] += bits - 0x4338000000000000;
        }
}
