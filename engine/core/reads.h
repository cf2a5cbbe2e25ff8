// How the options want files read.
#pragma once

#include "io/reader.h"
#include "smoe/engine.h"

namespace smoe {

inline ReaderOptions reads_of(const EngineOptions& options) {
  ReaderOptions how;
  if (options.read_mode == ReadMode::direct) how.mode = DirectMode::direct;
  if (options.read_mode == ReadMode::buffered) how.mode = DirectMode::buffered;
  if (options.io == IoBackend::uring) how.kind = ReaderKind::uring;
  if (options.io == IoBackend::pread) how.kind = ReaderKind::pread;
  if (options.io_workers != 0) how.workers = options.io_workers;
  return how;
}

}  // namespace smoe
