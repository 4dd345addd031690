/* All steps of a local training: the loop of hushfleet/methods/local_round.py for plain gradients, to the last bit.
 *
 * Like the optimizers, this is compiled without contraction; the gradient is another library's function.
 */
#include <stdint.h>
#include <string.h>

typedef void Take(void *to, float *gradient, int64_t start, int64_t count);
typedef int Gradient(const float *params, const float *images, const int64_t *labels, int batch,
                     const float *const *masks, int from, int until, Take *take, void *to, float *out, float *loss,
                     void *scratch);

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

/* One step of a part.
 *
 * pulls: weights of pulls to `center`.
 * settings: learning rate and momentum, or Adam's constants; `corrections`: the two numbers of this step of Adam. */
typedef struct {
    const Part *part;
    float *params;
    const float *pulls, *center, *settings, *corrections;
    int pull_count;
} Move;

/* Moves some parameters by their gradient. */
static void move(void *to, float *gradient, int64_t start, int64_t count)
{
    const Move *const m = to;
    const Part *const part = m->part;
    const int64_t first = start > part->start ? start : part->start;
    const int64_t size = (start + count < part->stop ? start + count : part->stop) - first;
    if (size <= 0)
        return;
    float *const params = m->params + first;
    gradient += first - start;
    for (int k = 0; k < m->pull_count; k++)
        for (int64_t i = 0; i < size; i++)
            gradient[i] += m->pulls[k] * (params[i] - m->center[first + i]);
    if (part->mask)
        for (int64_t i = 0; i < size; i++)
            gradient[i] *= part->mask[first + i];
    const float *const settings = m->settings;
    const int64_t inside = first - part->start;
    if (part->square)
        adam_step(params, gradient, part->mean + inside, part->square + inside, size, settings[0], settings[1],
                  settings[2], settings[3], m->corrections[0], settings[4], m->corrections[1]);
    else if (part->mean)
        momentum_step(params, gradient, part->mean + inside, size, settings[1], settings[0]);
    else
        sgd_step(params, gradient, size, settings[0]);
}

/* Moves `params` by all steps; `loss_sum` gets the sum of the losses of all samples. Returns the index in `places` of a
 * sample whose label is no class, or -1. */
static int64_t descend_one(Gradient *compute, void *scratch, float *params, const Samples *samples, const Step *steps,
                           int64_t step_count, const int64_t *places, Part *parts, const float *pulls, int pull_count,
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
        Move to = {part, params, pulls, center, settings, corrections + 2 * part->steps, pull_count};
        float loss;
        const int wrong =
            compute(params, x, y, step->size, 0, part->from, part->until, move, &to, gradient, &loss, scratch);
        if (wrong >= 0)
            return at - places + wrong;
        part->steps += part->square != 0;
        if (step->fresh)
            *loss_sum += (double)loss * step->size;
    }
    return -1;
}

/* What one client has of `steps` and of `places`. */
typedef struct {
    int64_t steps, places;
} Share;

/* Trains clients one after the other, each from its row of `params`. Returns the index in `places` of a sample whose label
 * is no class, or -1.
 *
 * places: of the samples of all batches, one batch after the other.
 * x, y, gradient: memory for a batch and for the gradient.
 * loss_sums: of each client. */
int64_t descend(Gradient *compute, void *scratch, float *params, int64_t size, const Share *clients, int client_count,
                const Samples *samples, const Step *steps, const int64_t *places, Part *parts, int part_count,
                const float *pulls, int pull_count, const float *center, const float *settings,
                const float *corrections, float *x, int64_t *y, float *gradient, double *loss_sums)
{
    const int64_t *at = places;
    for (int c = 0; c < client_count; c++) {
        for (Part *part = parts; part < parts + part_count; part++) {
            const size_t bytes = (part->stop - part->start) * sizeof(float);
            part->steps = 0;
            if (part->mean)
                memset(part->mean, 0, bytes);
            if (part->square)
                memset(part->square, 0, bytes);
        }
        loss_sums[c] = 0;
        const int64_t wrong =
            descend_one(compute, scratch, params + c * size, samples, steps, clients[c].steps, at, parts, pulls,
                        pull_count, center, settings, corrections, x, y, gradient, loss_sums + c);
        if (wrong >= 0)
            return at - places + wrong;
        steps += clients[c].steps;
        at += clients[c].places;
    }
    return -1;
}
