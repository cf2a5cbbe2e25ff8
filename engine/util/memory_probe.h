// How fast memory is read, which bounds decoding: every active weight is read once a token.
#pragma once

#include <cstdint>

#include "smoe/status.h"

namespace smoe {

// Bytes per second that `threads` threads together read from a buffer larger than the caches; the best of the passes
// that fit into `seconds`, so that a neighbour's burst does not count. Errors: Code::resources.
Result<double> probe_memory(uint32_t threads, double seconds);

}  // namespace smoe
