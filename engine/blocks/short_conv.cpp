#include "blocks/short_conv.h"

namespace smoe {

void short_conv(const Compute& c, const RecurrentSpec& spec, const ShortConvWeights& w, Batch batch, Workspace& ws,
                Activations& input, size_t first) {
  const size_t T = input.rows(), n = spec.channels();
  linear(c, w.in, input, ws.q);
  c.pool->run(T, [&](size_t t, size_t) {
    const float *gate = ws.q + t * 3 * n, *value = gate + 2 * n;
    for (size_t i = 0; i < n; ++i) ws.v[t * n + i] = gate[i] * value[i];
  });
  convolve(c, spec, w.conv, batch, {0, n}, false, ws.v, n, ws.v, n);
  if (first == T) return;
  c.pool->run(T - first, [&](size_t r, size_t) {
    const float *gate = ws.q + (first + r) * 3 * n + n, *y = ws.v + (first + r) * n;
    for (size_t i = 0; i < n; ++i) ws.attn[r * n + i] = gate[i] * y[i];
  });
  input.bind(ws.attn, T - first, n);
  linear(c, w.out, input, ws.block_out);
}

}  // namespace smoe
