// How fast this machine reads: whole records from the disk that holds the vault, and memory, each measured for a
// moment. What core/speed.h makes a prediction of, beside core/rehearsal.h.
#pragma once

#include <cstdint>

#include "io/probe.h"
#include "smoe/engine.h"
#include "smoe/model.h"

namespace smoe {

struct Rates {
  double memory_bytes_s = 0;     // all threads together
  double disk_read_bytes_s = 0;  // several records in flight
  bool direct_io = false;
  // n records asked for at once are all there after read_first_s + n * read_each_s.
  double read_first_s = 0, read_each_s = 0;
};

// Takes about `seconds` altogether. `options` chooses threads, backend, read mode, and names both files. A dense
// model's disk rate is that of its trunk. Errors: Code::io, Code::resources.
Result<Rates> measure_rates(const ModelSpec& model, const EngineOptions& options, double seconds);

}  // namespace smoe
