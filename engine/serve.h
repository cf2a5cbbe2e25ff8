// The loop behind `smoe-engine --serve`: one thread reads lines, the caller's thread runs the requests in their order,
// those with a tag together.
// So a CANCEL or a MASK is seen while a generation runs, and the engine keeps its single caller.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "smoe/engine.h"

namespace smoe {

// Where the lines come from and the words go. read() and write() are called from different threads.
class Wire {
 public:
  virtual ~Wire() = default;
  virtual size_t read(char* data, size_t size) = 0;  // blocks; 0 = the end
  virtual bool write(std::string_view words) = 0;    // all of it, at once; false = nobody reads any more
  virtual void stop() = 0;                           // from any thread: read() returns 0 from now on
};

// Over two descriptors, which stay the caller's. A closed reader makes write() fail, not the process (SIGPIPE is the
// caller's to ignore).
Result<std::unique_ptr<Wire>> open_wire(int in_fd, int out_fd);

struct ServeOptions {
  Sampling defaults;        // what a request does not say
  bool instrument = false;  // log each request's time by bucket
};

// Until the end of input (ok; requests already read are answered) or of the output (Code::io). Bounded memory: at most
// kMaxQueued requests of kMaxQueuedBytes wait; beyond that nothing more is read until one is done.
inline constexpr size_t kMaxQueued = 64, kMaxQueuedBytes = 2 << 20;
Status serve(Engine& engine, Wire& wire, const ServeOptions& options, const Log& log);

// One request, without reading any input: the reply goes to the wire, its failure is returned too.
Status run_once(Engine& engine, Wire& wire, const Request& request, const ServeOptions& options, const Log& log);

}  // namespace smoe
