// From tiles to matrices: cuts a call into tiles of P panels times T tokens and hands each to the encoding's tile
// function. Shared by the ISAs; included inside the target region and the unnamed namespace of each, after it has
// defined
//   kTileTokens  tokens in a full tile
//   kTilePanels  panels in a full tile (1 or 2)
//   kStreamTokens  tokens in a full tile of one panel, of calls of few tokens
// and per encoding a struct E with a function template tile<P, T>(const Tile&) (act.h).

struct PanelCall {
  const Matrix& w;
  const uint8_t* acts;
  const uint32_t* index;
  size_t act_bytes, row0, row1;
  float* y;
  size_t y_stride;
};

constexpr size_t kTokenBlock = 96;  // tokens whose activations stay in the second-level cache
constexpr size_t kFewTokens = 8;    // calls of at most so many are bound by reading the weights from memory

template <class E, int P, int T>
void run_tile(const PanelCall& call, size_t row, size_t t0, bool ahead) {
  const uint8_t* acts[T];
  for (size_t t = 0; t < T; ++t) acts[t] = act_row(call.acts, call.index, t0 + t, call.act_bytes);
  const size_t blocks = call.w.cols / encoding_info(call.w.encoding).block_values;
  const size_t panel = kPanelRows * blocks * encoding_info(call.w.encoding).block_bytes;
  alignas(64) float out[P * T * kLanes];
  E::template tile<P, T>({call.w.data + row / kPanelRows * panel, panel, blocks, acts, out, call.w.encoding, ahead});
  for (size_t p = 0; p < P; ++p) {
    const size_t first_row = row + p * kPanelRows;
    const size_t rows = call.row1 - first_row < kPanelRows ? call.row1 - first_row : kPanelRows;
    for (size_t t = 0; t < T; ++t) {
      store(call.y + (t0 + t) * call.y_stride + first_row, load(out + (p * T + t) * kLanes), rows);
    }
  }
}

// The last tile, of at most T tokens.
template <class E, int P, int T>
void run_rest(const PanelCall& call, size_t row, size_t t0, size_t tokens, bool ahead) {
  if (tokens == T) return run_tile<E, P, T>(call, row, t0, ahead);
  if constexpr (T > 1) run_rest<E, P, T - 1>(call, row, t0, tokens, ahead);
}

template <class E, int P>
void run_tokens(const PanelCall& call, size_t row, size_t t0, size_t t1) {
  size_t t = t0;
  for (; t + kTileTokens <= t1; t += kTileTokens) run_tile<E, P, kTileTokens>(call, row, t, false);
  if constexpr (kTileTokens > 1) run_rest<E, P, kTileTokens - 1>(call, row, t, t1 - t, false);
}

// Few tokens: one stream of panels, prefetched by the first of the tiles that a panel needs.
template <class E>
void run_stream(const PanelCall& call, size_t tokens) {
  for (size_t row = call.row0; row < call.row1; row += kPanelRows) {
    for (size_t t = 0; t < tokens; t += kStreamTokens) {
      const size_t count = tokens - t < kStreamTokens ? tokens - t : kStreamTokens;
      run_rest<E, 1, kStreamTokens>(call, row, t, count, t == 0);
    }
  }
}

template <class E>
void run_matrix(const PanelCall& call, size_t tokens) {
  if (tokens <= kFewTokens) return run_stream<E>(call, tokens);
  for (size_t t0 = 0; t0 < tokens; t0 += kTokenBlock) {
    const size_t t1 = tokens - t0 < kTokenBlock ? tokens : t0 + kTokenBlock;
    size_t row = call.row0;
    if constexpr (kTilePanels > 1) {
      for (; row + kPanelRows < call.row1; row += kTilePanels * kPanelRows) {
        run_tokens<E, kTilePanels>(call, row, t0, t1);
      }
    }
    for (; row < call.row1; row += kPanelRows) run_tokens<E, 1>(call, row, t0, t1);
  }
}

#include "kernels/strip_tiles.h"

void matmul_q8(const Matrix& w, const uint8_t* acts, const uint32_t* act_index, size_t tokens, size_t row0, size_t row1,
               float* y, size_t y_stride) {
  if (w.layout != Layout::panel16) {
    return scalar_kernels().matmul_q8(w, acts, act_index, tokens, row0, row1, y, y_stride);
  }
  const PanelCall call = {w, acts, act_index, act_row_bytes(act_format(w.encoding), w.cols), row0, row1, y, y_stride};
  switch (w.encoding) {
    case Encoding::q8_0:
      return run_matrix<Q8_0>(call, tokens);
    case Encoding::q4_0:
      return run_matrix<Q4_0>(call, tokens);
    case Encoding::q4_k:
      return run_matrix<Q4_K>(call, tokens);
    case Encoding::q6_k:
      return run_matrix<Q6_K>(call, tokens);
    default:
      return visit_strips(w.encoding, StripTiles{call, tokens});
  }
}
