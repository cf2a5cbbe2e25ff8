// Allocates a Workspace, and says beforehand how large it will be.
//
// Where there are experts, only the buffers of a decode step have memory of their own. Those of a prompt's chunk lie in
// memory that the expert cache lends (ExpertCache::lend): for decoding, some tens of experts more are worth a lot, and
// while a prompt is computed the experts are streamed through the cache anyway.
#pragma once

#include "blocks/workspace.h"
#include "smoe/model.h"
#include "util/aligned_buffer.h"

namespace smoe {

class Scratch {
 public:
  // Rows that are always there: all of a chunk, or as many as there are logits, or sessions.
  static uint32_t own_rows(const ModelSpec& model, uint32_t chunk, uint32_t sessions);
  static uint64_t bytes(const ModelSpec& model, uint32_t rows, uint32_t threads);
  // Of use(): the logits are not among them.
  static uint64_t chunk_bytes(const ModelSpec& model, uint32_t rows, uint32_t threads);
  static Result<Scratch> allocate(const ModelSpec& model, uint32_t own_rows, uint32_t threads);

  // The same object always; what it points to moves with use() and use_own().
  Workspace& workspace() { return workspace_; }
  // Lays the workspace out for `rows` in chunk_bytes(rows) of somebody else's memory. Only the logits survive.
  void use(const ModelSpec& model, uint32_t rows, uint32_t threads, uint8_t* memory);
  void use_own(const ModelSpec& model, uint32_t threads);
  uint32_t own_rows() const { return own_rows_; }

 private:
  Workspace workspace_;
  AlignedBuffer memory_;
  uint32_t own_rows_ = 0;
};

}  // namespace smoe
