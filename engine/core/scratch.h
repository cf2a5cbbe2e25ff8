// Allocates a Workspace, and says beforehand how large it will be.
#pragma once

#include "blocks/workspace.h"
#include "smoe/model.h"
#include "util/aligned_buffer.h"

namespace smoe {

class Scratch {
 public:
  static uint64_t bytes(const ModelSpec& model, uint32_t chunk, uint32_t threads);
  static Result<Scratch> allocate(const ModelSpec& model, uint32_t chunk, uint32_t threads);
  Workspace& workspace() { return workspace_; }

 private:
  Workspace workspace_;
  AlignedBuffer memory_;
};

}  // namespace smoe
