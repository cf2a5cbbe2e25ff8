#include "blocks/ahead.h"

#include <algorithm>
#include <numeric>

namespace smoe {
namespace {

constexpr size_t kPromptRows = 16;  // from here on rows are mostly those of prompts

// The coming layer's choice, were it made now, into ws.ahead_chosen. False if its router cannot be asked.
bool guess(const Compute& c, const Ahead& ahead, Workspace& ws) {
  const Matrix& w = ahead.router->logits.weight;
  if (c.format(w) != ActFormat::none) return false;  // the buffers of quantised activations hold this layer's input
  const float* x = ahead.x;
  if (ahead.norm->weight != nullptr) {
    x = ws.block_out;  // nothing is in it before the layer's first expert
    c.pool->run(ahead.rows, [&](size_t t, size_t) {
      normalize_row(c, ahead.norm_kind, *ahead.norm, ahead.x + t * w.cols, w.cols, ahead.norm_eps,
                    ws.block_out + t * w.cols);
    });
  }
  Workspace aside = ws;  // this layer's choice stays where it is
  aside.chosen = ws.ahead_chosen;
  aside.weights = ws.ahead_weights;
  Activations input(nullptr, nullptr);
  input.bind(x, ahead.rows, w.cols);
  route(c, *ahead.spec, *ahead.router, input, aside);
  return true;
}

// Distinct experts of ws.ahead_chosen into ws.ahead_experts, those that most rows chose first; of equals the one that
// was chosen first. How many.
size_t rank(const FfnSpec& spec, size_t rows, Workspace& ws) {
  uint32_t* uses = ws.ahead_uses;
  std::fill_n(uses, spec.experts, 0u);
  size_t distinct = 0;
  for (size_t i = 0; i < rows * spec.top_k; ++i)
    if (uses[ws.ahead_chosen[i]]++ == 0) ws.ahead_experts[distinct++] = ws.ahead_chosen[i];
  // Insertion, for it is stable without memory of its own; there are some hundreds at most.
  for (size_t i = 1; i < distinct && rows > 1; ++i)
    for (size_t j = i; j > 0 && uses[ws.ahead_experts[j]] > uses[ws.ahead_experts[j - 1]]; --j)
      std::swap(ws.ahead_experts[j], ws.ahead_experts[j - 1]);
  return distinct;
}

// Reads on a guess for each one of --spec: about what a disk does while a layer's attention is computed. Several
// sequences that decode leave most experts alone, so that a guess beyond the first few is often wrong, and delays what
// is asked for. A prompt's rows ask for nearly all: what most of them chose is certain.
size_t reads_ahead(size_t rows) { return rows < kPromptRows ? 1 + rows / 8 : 4 + rows / 4; }

}  // namespace

void read_ahead(const Compute& c, const Ahead& ahead, ExpertCache& cache, Workspace& ws) {
  if (ahead.most == 0 || !cache.takes_guesses(ahead.moe_layer) || !guess(c, ahead, ws)) return;
  const size_t distinct = rank(*ahead.spec, ahead.rows, ws);
  cache.prefetch(ahead.moe_layer, ws.ahead_experts, distinct,
                 static_cast<uint32_t>(ahead.most * reads_ahead(ahead.rows)));
}

}  // namespace smoe
