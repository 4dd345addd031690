/* Convolution, ReLU and max-pooling of one image, forward and backward.
 *
 * Inside, channels are innermost: an image is [row][column][channel], and the weights are [tap][channel][output]
 * forward and [output][tap][channel] backward, where taps are the kernel's positions, row by row.
 */

typedef struct {
    int inputs, outputs, kernel;
    int height, width;             /* of the outputs, before pooling */
    int window;                    /* 2: pooled by 2x2; 1: ReLU alone */
    int x_row, x_pixel, x_channel; /* strides of the padded input, in floats */
    int y_row;                     /* stride of the pooled outputs, in floats; a pixel is `outputs` */
    int rows, pixels, vectors;     /* the forward kernel's tile of accumulators */
    int run;                       /* the backward kernels' */
    int word;                      /* outputs whose bits share a word of 64 */
    int band;                      /* pooled rows whose inputs fit the first-level cache */
} Conv;

/* Which outputs of which pixels a gradient comes back to: for each pixel after pooling and each corner of its window,
 * one bit for each output that was above 0 and the window's maximum there. */
#define WORDS(s) (s.outputs / s.word)
#define CORNERS(s) (s.window * s.window)

KERNEL void pack_forward(const Conv s, const float *weight, float *packed)
{
    const int taps = s.kernel * s.kernel;
    for (int tap = 0; tap < taps; tap++)
        for (int c = 0; c < s.inputs; c++)
            for (int o = 0; o < s.outputs; o++)
                packed[(tap * s.inputs + c) * s.outputs + o] = weight[(o * s.inputs + c) * taps + tap];
}

KERNEL void pack_backward(const Conv s, const float *weight, float *packed)
{
    const int taps = s.kernel * s.kernel;
    for (int o = 0; o < s.outputs; o++)
        for (int tap = 0; tap < taps; tap++)
            for (int c = 0; c < s.inputs; c++)
                packed[(o * taps + tap) * s.inputs + c] = weight[(o * s.inputs + c) * taps + tap];
}

/* The inverses, for the weights' gradients. */
KERNEL void unpack_forward(const Conv s, const float *packed, float *weight)
{
    const int taps = s.kernel * s.kernel;
    for (int tap = 0; tap < taps; tap++)
        for (int c = 0; c < s.inputs; c++)
            for (int o = 0; o < s.outputs; o++)
                weight[(o * s.inputs + c) * taps + tap] = packed[(tap * s.inputs + c) * s.outputs + o];
}

KERNEL void unpack_backward(const Conv s, const float *packed, float *weight)
{
    const int taps = s.kernel * s.kernel;
    for (int o = 0; o < s.outputs; o++)
        for (int tap = 0; tap < taps; tap++)
            for (int c = 0; c < s.inputs; c++)
                weight[(o * s.inputs + c) * taps + tap] = packed[(o * taps + tap) * s.inputs + c];
}

KERNEL void conv_tile(const Conv s, const float *x, const float *weight, const float *bias, float *y,
                      const int rows, const int pixels)
{
    vec sum[REGISTERS], w[REGISTERS];
    UNROLL
    for (int v = 0; v < s.vectors; v++)
        UNROLL
        for (int i = 0; i < rows * pixels; i++)
            sum[i * s.vectors + v] = load(bias + v * LANES);
    for (int ky = 0; ky < s.kernel; ky++)
        for (int kx = 0; kx < s.kernel; kx++)
            for (int c = 0; c < s.inputs; c++) {
                const float *from = x + ky * s.x_row + kx * s.x_pixel + c * s.x_channel;
                UNROLL
                for (int v = 0; v < s.vectors; v++)
                    w[v] = load(weight + v * LANES);
                weight += s.outputs;
                UNROLL
                for (int i = 0; i < rows * pixels; i++) {
                    const vec value = spread(from + i / pixels * s.x_row + i % pixels * s.x_pixel);
                    UNROLL
                    for (int v = 0; v < s.vectors; v++)
                        sum[i * s.vectors + v] += value * w[v];
                }
            }
    UNROLL
    for (int i = 0; i < rows * pixels; i++)
        UNROLL
        for (int v = 0; v < s.vectors; v++)
            store(y + (i / pixels * s.width + i % pixels) * s.outputs + v * LANES, sum[i * s.vectors + v]);
}

/* Rows of outputs before ReLU: y [s.rows][width][outputs]. */
KERNEL void conv_rows(const Conv s, const float *x, const float *weight, const float *bias, float *y)
{
    for (int o = 0; o < s.outputs; o += s.vectors * LANES) {
        int column = 0;
        for (; column + s.pixels <= s.width; column += s.pixels)
            conv_tile(s, x + column * s.x_pixel, weight + o, bias + o, y + column * s.outputs + o, s.rows, s.pixels);
        if (s.width % s.pixels)
            conv_tile(s, x + column * s.x_pixel, weight + o, bias + o, y + column * s.outputs + o, s.rows,
                      s.width % s.pixels);
    }
}

/* ReLU and pooling of `window` rows. The first of equal maxima wins, and NaN wins over all, as in PyTorch. */
KERNEL void relu_pool(const Conv s, const float *rows, float *y, uint64_t *alive)
{
    for (int column = 0; column < s.width / s.window; column++, alive += CORNERS(s) * WORDS(s))
        for (int word = 0; word < WORDS(s); word++) {
            const float *window = rows + column * s.window * s.outputs + word * s.word;
            uint64_t best[4] = {0}, live = 0;
            UNROLL
            for (int o = 0; o < s.word; o += LANES) {
                vec value[4], top, sum;
                UNROLL
                for (int corner = 0; corner < CORNERS(s); corner++) {
                    value[corner] = load(window + (corner / s.window * s.width + corner % s.window) * s.outputs + o);
                    top = corner ? larger(value[corner], top) : value[0];
                    sum = corner ? sum + value[corner] : value[0];
                }
                if (bits_equal(sum, sum) != (1 << LANES) - 1) /* some value may be NaN, and then the sum is */
                    for (int corner = 0; corner < CORNERS(s); corner++)
                        top += keep(~bits_equal(value[corner], value[corner]), value[corner]);
                store(y + column * s.outputs + word * s.word + o, larger((vec){0}, top));
                live |= bits_less((vec){0}, top) << o;
                UNROLL
                for (int corner = 0; corner < CORNERS(s); corner++)
                    best[corner] |= bits_equal(value[corner], top) << o;
            }
            UNROLL
            for (int corner = 0; corner < CORNERS(s); corner++) {
                alive[corner * WORDS(s) + word] = best[corner] & live;
                live &= ~best[corner];
            }
        }
}

/* One image through the layer. `rows` holds max(s.rows, window) rows of outputs. */
KERNEL void conv_forward(const Conv s, const float *x, const float *weight, const float *bias, float *rows, float *y,
                         uint64_t *alive)
{
    for (int row = 0; row < s.height / s.window; row++) {
        for (int part = 0; part < s.window; part += s.rows)
            conv_rows(s, x + (row * s.window + part) * s.x_row, weight, bias, rows + part * s.width * s.outputs);
        relu_pool(s, rows, y + row * s.y_row, alive + row * (s.width / s.window) * CORNERS(s) * WORDS(s));
    }
}

/* Sets the gradient to 0 where ReLU was dead, adds what is left to the bias's, and takes the bits of zeros away. */
KERNEL void relu_gradient(const Conv s, uint64_t *alive, float *grad, float *grad_bias)
{
    const int columns = s.width / s.window;
    for (int word = 0; word < WORDS(s); word++) {
        vec sum[64 / LANES] = {0};
        for (int row = 0; row < s.height / s.window; row++)
            for (int column = 0; column < columns; column++) {
                uint64_t *bits = alive + (row * columns + column) * CORNERS(s) * WORDS(s) + word, any = 0, left = 0;
                float *at = grad + row * s.y_row + column * s.outputs + word * s.word;
                UNROLL
                for (int corner = 0; corner < CORNERS(s); corner++)
                    any |= bits[corner * WORDS(s)];
                UNROLL
                for (int o = 0; o < s.word; o += LANES) {
                    const vec kept = keep(any >> o, load(at + o));
                    store(at + o, kept);
                    sum[o / LANES] += kept;
                    left |= (bits_equal(kept, (vec){0}) ^ ((1 << LANES) - 1)) << o;
                }
                UNROLL
                for (int corner = 0; corner < CORNERS(s); corner++)
                    bits[corner * WORDS(s)] &= left;
            }
        UNROLL
        for (int o = 0; o < s.word; o += LANES)
            store(grad_bias + word * s.word + o, load(grad_bias + word * s.word + o) + sum[o / LANES]);
    }
}

/* After pooling, at most one gradient in four is not 0; the kernels of inner layers work on those alone. */
typedef struct {
    int32_t at; /* where in x the patch begins that the gradient belongs to */
    float value;
} Entry;

/* Lists the gradients of rows [first, last) of the pooled outputs for each output: entries [output][room]. */
KERNEL void list_gradients(const Conv s, const float *grad, const uint64_t *alive, int first, int last, Entry *entries,
                           int *counts, const int room)
{
    const int columns = s.width / s.window;
    memset(counts, 0, sizeof(int) * s.outputs);
    alive += first * columns * CORNERS(s) * WORDS(s);
    for (int row = first; row < last; row++)
        for (int column = 0; column < columns; column++, alive += CORNERS(s) * WORDS(s)) {
            const float *values = grad + row * s.y_row + column * s.outputs;
            const int32_t at = row * s.window * s.x_row + column * s.window * s.x_pixel;
            UNROLL
            for (int i = 0; i < WORDS(s); i++) {
                const uint64_t right = s.window == 2 ? alive[WORDS(s) + i] | alive[3 * WORDS(s) + i] : 0;
                const uint64_t lower = s.window == 2 ? alive[2 * WORDS(s) + i] | alive[3 * WORDS(s) + i] : 0;
                for (uint64_t bits = alive[i] | right | lower; bits; bits &= bits - 1) {
                    const int bit = __builtin_ctzll(bits), output = i * s.word + bit;
                    const int32_t inside = (right >> bit & 1) * s.x_pixel + (lower >> bit & 1) * s.x_row;
                    entries[output * room + counts[output]++] = (Entry){at + inside, values[output]};
                }
            }
        }
}

/* Where vector `v` of a patch [kernel][kernel][inputs] lies in x. */
KERNEL int patch_vector(const Conv s, int v)
{
    const int in_row = s.kernel * s.inputs / LANES;
    return v / in_row * s.x_row + v % in_row * LANES;
}

KERNEL void patch_weight_gradient(const Conv s, const float *x, const Entry *entries, int count, float *grad_weight,
                                  const int begin, const int vectors)
{
    vec sum[REGISTERS];
    UNROLL
    for (int v = 0; v < vectors; v++)
        sum[v] = load(grad_weight + (begin + v) * LANES);
    for (int n = 0; n < count; n++)
        UNROLL
        for (int v = 0; v < vectors; v++)
            sum[v] += entries[n].value * load(x + entries[n].at + patch_vector(s, begin + v));
    UNROLL
    for (int v = 0; v < vectors; v++)
        store(grad_weight + (begin + v) * LANES, sum[v]);
}

/* Gradient of an inner layer by its weights, added to [output][tap][channel]. */
KERNEL void conv_weight_gradient(const Conv s, const float *x, const uint64_t *alive, const float *grad,
                                 float *grad_weight, Entry *entries, int *counts)
{
    const int size = s.kernel * s.kernel * s.inputs, vectors = size / LANES, height = s.height / s.window;
    const int room = s.band * (s.width / s.window);
    for (int first = 0; first < height; first += s.band) {
        list_gradients(s, grad, alive, first, first + s.band < height ? first + s.band : height, entries, counts, room);
        for (int o = 0; o < s.outputs; o++)
            UNROLL
            for (int v = 0; v < vectors; v += s.run)
                patch_weight_gradient(s, x, entries + o * room, counts[o], grad_weight + o * size, v,
                                      v + s.run < vectors ? s.run : vectors - v);
    }
}

KERNEL void patch_input_gradient(const Conv s, const float *weight, const uint64_t *alive, const float *grad,
                                 float *grad_x, const int begin, const int vectors)
{
    const int size = s.kernel * s.kernel * s.inputs;
    for (int row = 0; row < s.height / s.window; row++)
        for (int column = 0; column < s.width / s.window; column++) {
            const float *values = grad + row * s.y_row + column * s.outputs;
            UNROLL
            for (int corner = 0; corner < CORNERS(s); corner++) {
                float *to = grad_x + (row * s.window + corner / s.window) * s.x_row +
                            (column * s.window + corner % s.window) * s.x_pixel;
                vec sum[REGISTERS];
                UNROLL
                for (int v = 0; v < vectors; v++)
                    sum[v] = load(to + patch_vector(s, begin + v));
                for (int i = 0; i < WORDS(s); i++)
                    for (uint64_t bits = *alive++; bits; bits &= bits - 1) {
                        const int output = i * s.word + __builtin_ctzll(bits);
                        UNROLL
                        for (int v = 0; v < vectors; v++)
                            sum[v] += values[output] * load(weight + output * size + (begin + v) * LANES);
                    }
                UNROLL
                for (int v = 0; v < vectors; v++)
                    store(to + patch_vector(s, begin + v), sum[v]);
            }
        }
}

/* Gradient of an inner layer by its padded input. */
KERNEL void conv_input_gradient(const Conv s, const float *weight, const uint64_t *alive, const float *grad,
                                float *grad_x)
{
    const int vectors = s.kernel * s.kernel * s.inputs / LANES;
    UNROLL
    for (int v = 0; v < vectors; v += s.run)
        patch_input_gradient(s, weight, alive, grad, grad_x, v, v + s.run < vectors ? s.run : vectors - v);
}

KERNEL void tap_weight_gradient(const Conv s, const float *x, const float *rows, float *grad_weight, const int begin,
                                const int taps)
{
    vec sum[REGISTERS], g[REGISTERS];
    UNROLL
    for (int i = 0; i < taps * s.vectors; i++)
        sum[i] = load(grad_weight + (begin + i / s.vectors) * s.outputs + i % s.vectors * LANES);
    for (int row = 0; row < s.window; row++)
        for (int column = 0; column < s.width; column++) {
            const float *from = x + row * s.x_row + column * s.x_pixel;
            UNROLL
            for (int v = 0; v < s.vectors; v++)
                g[v] = load(rows + (row * s.width + column) * s.outputs + v * LANES);
            UNROLL
            for (int t = 0; t < taps; t++) {
                const int tap = (begin + t) / s.inputs, c = (begin + t) % s.inputs;
                const vec value = spread(from + tap / s.kernel * s.x_row + tap % s.kernel * s.x_pixel + c * s.x_channel);
                UNROLL
                for (int v = 0; v < s.vectors; v++)
                    sum[t * s.vectors + v] += value * g[v];
            }
        }
    UNROLL
    for (int i = 0; i < taps * s.vectors; i++)
        store(grad_weight + (begin + i / s.vectors) * s.outputs + i % s.vectors * LANES, sum[i]);
}

/* Spreads a row of the gradient over the `window` rows before pooling. */
KERNEL void unpool(const Conv s, const float *grad, const uint64_t *alive, float *rows)
{
    for (int column = 0; column < s.width / s.window; column++, alive += CORNERS(s) * WORDS(s)) {
        float *window = rows + column * s.window * s.outputs;
        for (int o = 0; o < s.outputs; o += LANES) {
            const vec value = load(grad + column * s.outputs + o);
            UNROLL
            for (int corner = 0; corner < CORNERS(s); corner++)
                store(window + (corner / s.window * s.width + corner % s.window) * s.outputs + o,
                      keep(alive[corner * WORDS(s) + o / s.word] >> o % s.word, value));
        }
    }
}

#if defined(__AVX512F__)
/* As below, of one channel with pooling: each output's gradient meets the inputs of one corner, which it finds in a table
 * of its pixel's inputs. A table has 8 inputs of a row and 8 of the next. */
KERNEL void corner_weight_gradient(const Conv s, const float *x, const uint64_t *alive, const float *grad,
                                   float *tables, float *grad_weight)
{
    const int height = s.height / 2, columns = s.width / 2, words = WORDS(s);
    const uint32_t used = (1 << (s.kernel + 1)) - 1;
    for (int row = 0; row < 2 * height + s.kernel - 2; row++)
        for (int column = 0; column < columns; column++) {
            const float *from = x + row * s.x_row + 2 * column;
            const vec upper = _mm512_maskz_loadu_ps(used, from);
            store(tables + (row * columns + column) * LANES,
                  _mm512_mask_loadu_ps(upper, used << 8, from + s.x_row - 8));
        }
    for (int o = 0; o < s.outputs; o += LANES) {
        vec sum[25];
        UNROLL
        for (int tap = 0; tap < s.kernel * s.kernel; tap++)
            sum[tap] = load(grad_weight + tap * s.outputs + o);
        for (int row = 0; row < height; row++)
            for (int column = 0; column < columns; column++) {
                const uint64_t *bits = alive + (row * columns + column) * CORNERS(s) * words + o / s.word;
                const uint64_t right = bits[words] | bits[3 * words], lower = bits[2 * words] | bits[3 * words];
                const ints at = (ints)keep(right >> o % s.word, (vec)((ints){0} + 1)) |
                                (ints)keep(lower >> o % s.word, (vec)((ints){0} + 8));
                const vec value = load(grad + row * s.y_row + column * s.outputs + o);
                UNROLL
                for (int tap = 0; tap < s.kernel * s.kernel; tap++) {
                    const vec table = load(tables + ((2 * row + tap % s.kernel) * columns + column) * LANES);
                    sum[tap % s.kernel * s.kernel + tap / s.kernel] +=
                        value * (vec)_mm512_permutexvar_ps((__m512i)(at + tap / s.kernel), table);
                }
            }
        UNROLL
        for (int tap = 0; tap < s.kernel * s.kernel; tap++)
            store(grad_weight + tap * s.outputs + o, sum[tap]);
    }
}
#endif

/* Gradient of the first layer by its weights, added to [tap][channel][output]: its few input channels fill no
 * vector, so here the outputs do, and the gradient is spread over the window's rows first. */
KERNEL void first_weight_gradient(const Conv s, const float *x, const uint64_t *alive, const float *grad, float *rows,
                                  float *grad_weight)
{
    const int taps = s.kernel * s.kernel * s.inputs, columns = s.width / s.window;
#if defined(__AVX512F__)
    if (s.inputs == 1 && s.window == 2 && s.kernel <= 5) {
        corner_weight_gradient(s, x, alive, grad, rows, grad_weight);
        return;
    }
#endif
    if (s.width % s.window)
        memset(rows, 0, sizeof(float) * s.window * s.width * s.outputs);
    for (int row = 0; row < s.height / s.window; row++) {
        unpool(s, grad + row * s.y_row, alive + row * columns * CORNERS(s) * WORDS(s), rows);
        for (int o = 0; o < s.outputs; o += s.vectors * LANES)
            UNROLL
            for (int t = 0; t < taps; t += s.run)
                tap_weight_gradient(s, x + row * s.window * s.x_row, rows + o, grad_weight + o, t,
                                    t + s.run < taps ? s.run : taps - t);
    }
}

/* [B, C, H, W] order, which the first linear layer's weights and the dropout masks have. */
KERNEL void flatten(const float *y, const float *mask, float *flat, const int pixels, const int channels)
{
    for (int c = 0; c < channels; c++)
        for (int p = 0; p < pixels; p++)
            flat[c * pixels + p] = mask ? y[p * channels + c] * mask[c * pixels + p] : y[p * channels + c];
}

KERNEL void unflatten(const float *flat, const float *mask, float *y, const int pixels, const int channels)
{
    for (int p = 0; p < pixels; p++)
        for (int c = 0; c < channels; c++)
            y[p * channels + c] = mask ? flat[c * pixels + p] * mask[c * pixels + p] : flat[c * pixels + p];
}

/* An image [C, H, W] into the middle of a padded one; the frame is left as it is. */
KERNEL void pad_image(const Conv s, const float *image, const int height, const int width, const int padding, float *x)
{
    for (int c = 0; c < s.inputs; c++)
        for (int row = 0; row < height; row++)
            memcpy(x + c * s.x_channel + (row + padding) * s.x_row + padding, image + (c * height + row) * width,
                   sizeof(float) * width);
}
