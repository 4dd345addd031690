/* All steps of a local training: the loop of hushfleet/methods/local_round.py for plain gradients, to the last bit.
 *
 * Like the optimizers, this is compiled without contraction; the gradient is another library's function.
 */
#include <stdint.h>

typedef int Gradient(const float *params, const float *images, const int64_t *labels, int batch,
                     const float *const *masks, int from, int until, float *out, float *loss, void *scratch);

/* The entries that one optimizer moves.
 *
 * from, until: the layers whose gradient it uses.
 * mask: of all entries; 0 if it moves all from `start` to `stop`.
 * mean, square: Adam's memory; momentum has the first alone, and plain steps have none. */
typedef struct {
    int64_t start, stop, from, until, steps;
    const uint8_t *mask;
    float *mean, *square;
} Part;

/* Stored values of samples; the network's input is value * scale - shift, by channel. */
typedef struct {
    const void *values;
    const int64_t *labels;
    const float *scale, *shift;
    int64_t are_bytes, channels, pixels;
} Samples;

/* One gradient of a batch of `size` samples for one part; the first of a batch is `fresh`. */
typedef struct {
    int32_t size, part, fresh;
} Step;

static void gather(const Samples *s, const int64_t *places, int batch, float *x, int64_t *y)
{
    for (int i = 0; i < batch; i++) {
        y[i] = s->labels[places[i]];
        size_t at = (size_t)places[i] * s->channels * s->pixels;
        for (int64_t c = 0; c < s->channels; c++, at += s->pixels, x += s->pixels) {
            const float scale = s->scale[c], shift = s->shift[c];
            const uint8_t *bytes = (const uint8_t *)s->values + at;
            const float *floats = (const float *)s->values + at;
            if (s->are_bytes)
                for (int64_t k = 0; k < s->pixels; k++)
                    x[k] = bytes[k] * scale - shift;
            else
                for (int64_t k = 0; k < s->pixels; k++)
                    x[k] = floats[k] * scale - shift;
        }
    }
}

static void move(Part *part, float *params, float *gradient, const float *settings, const float *corrections)
{
    const size_t size = part->stop - part->start;
    params += part->start, gradient += part->start;
    if (part->mask)
        for (size_t i = 0; i < size; i++)
            gradient[i] *= part->mask[part->start + i];
    if (part->square) {
        corrections += 2 * part->steps++;
        adam_step(params, gradient, part->mean, part->square, size, settings[0], settings[1], settings[2],
                  settings[3], corrections[0], settings[4], corrections[1]);
    } else if (part->mean)
        momentum_step(params, gradient, part->mean, size, settings[1], settings[0]);
    else
        sgd_step(params, gradient, size, settings[0]);
}

/* Moves `params`; `loss_sum` gets the sum of the losses of all samples. Returns the index in `places` of a sample whose
 * label is no class, or -1.
 *
 * places: of the samples of all batches, one batch after the other.
 * pulls: weights of pulls to `center`.
 * settings: learning rate and momentum, or Adam's constants; `corrections`: two numbers for each step of Adam.
 * x, y, gradient: memory for a batch and for the gradient. */
int64_t descend(Gradient *compute, void *scratch, float *params, const Samples *samples, const Step *steps,
                int step_count, const int64_t *places, Part *parts, const float *pulls, int pull_count,
                const float *center, const float *settings, const float *corrections, float *x, int64_t *y,
                float *gradient, double *loss_sum)
{
    const int64_t *at = places, *next = places;
    for (const Step *step = steps; step < steps + step_count; step++) {
        if (step->fresh) {
            at = next;
            next += step->size;
            gather(samples, at, step->size, x, y);
        }
        Part *const part = parts + step->part;
        float loss;
        const int wrong = compute(params, x, y, step->size, 0, part->from, part->until, gradient, &loss, scratch);
        if (wrong >= 0)
            return at - places + wrong;
        if (step->fresh)
            *loss_sum += (double)loss * step->size;
        for (int k = 0; k < pull_count; k++)
            for (int64_t i = part->start; i < part->stop; i++)
                gradient[i] += pulls[k] * (params[i] - center[i]);
        move(part, params, gradient, settings, corrections);
    }
    return -1;
}
