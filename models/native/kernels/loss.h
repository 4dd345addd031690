/* The mean cross-entropy of a batch; the logits become its gradient by them, in place. Returns the first sample whose
 * label is no class, or -1. */
KERNEL int cross_entropy(int batch, const int classes, float *logits, size_t stride, const int64_t *labels, float *loss)
{
    double sum = 0;
    for (int i = 0; i < batch; i++, logits += stride) {
        if (labels[i] < 0 || labels[i] >= classes)
            return i;
        float top = logits[0], total = 0;
        for (int j = 1; j < classes; j++)
            top = logits[j] > top ? logits[j] : top;
        const float right = logits[labels[i]] - top;
        for (int j = 0; j < classes; j++)
            total += logits[j] = expf(logits[j] - top);
        sum += logf(total) - right;
        for (int j = 0; j < classes; j++)
            logits[j] = (logits[j] / total - (j == labels[i])) / batch;
    }
    *loss = (float)(sum / batch);
    return -1;
}
