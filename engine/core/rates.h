// How fast this machine does what the engine spends its time on, each measured for a moment: reads of whole records
// from the disk that holds the vault, reads of memory, products of the model's own encodings with the chosen kernels.
// What core/speed.h makes a prediction of.
#pragma once

#include <cstdint>
#include <map>
#include <string>

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
  std::map<Encoding, double> decode_bytes_s;   // weights, from memory, for one token
  std::map<Encoding, double> prefill_bytes_s;  // weight bytes times tokens, in tiles of tokens
  double hand_out_s = 0;                       // handing one parallel loop to all threads
};

// Takes about `seconds` altogether. `options` chooses threads, ISA, backend, read mode, and names both files. A
// dense model's disk rate is that of its trunk. Errors: Code::io, Code::resources.
Result<Rates> measure_rates(const ModelSpec& model, const EngineOptions& options, double seconds);

}  // namespace smoe
