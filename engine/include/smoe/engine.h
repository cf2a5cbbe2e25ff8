// The engine: opens a vault under a memory plan and answers requests, one at a time or several together. Not
// thread-safe: one caller.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "smoe/model.h"
#include "smoe/plan.h"
#include "smoe/session.h"
#include "smoe/status.h"

namespace smoe {

enum class IoBackend { automatic, pread, uring };
enum class ReadMode { automatic, direct, buffered };

struct EngineOptions {
  std::string vault;  // path of the .smoe
  std::string scout;  // "" = <stem>.scout.safetensors beside it
  PlanOptions plan;   // budget, ctx, threads (0 = affinity and cgroup quota) ...
  std::string isa = "auto";
  IoBackend io = IoBackend::automatic;
  ReadMode read_mode = ReadMode::automatic;
  bool verify_reads = false;
  uint32_t io_workers = 0;              // threads that read from disk; 0 = the engine's choice
  std::string cache_policy;             // which expert gives way, by a name of experts/policy.h; "" = the default
  std::string history;                  // file of how often each expert was used, read at open and kept; "" = none
  bool warm = true;                     // idle() reads what was used most
  std::string trace;                    // file to write the routing trace to (experts/trace.h); "" = none
  uint32_t spec = 1;                    // records read on a guess, per layer of a token; 0 = none
  uint32_t draft = 0;                   // tokens to guess at from the conversation and verify together; 0 = off
  bool draft_where_it_wins = false;     // only for a sequence that runs alone, and while guesses save time
  std::string ledger;                   // file in which engines tell each other what memory they take; "" = none
  bool watch_columns = false;           // count what the matrices are multiplied with, for column_sums()
  std::vector<int32_t> penalty_exempt;  // ids the repetition penalty leaves alone, passed by the launcher
};

// Of what a matrix was multiplied with: the sum over `rows` rows of the square of each column.
struct ColumnSum {
  std::string name;  // of a trunk tensor, or "layers.L.experts.E.input" (gate and up) and ".middle" (down)
  std::vector<double> squares;
  uint64_t rows = 0;
};

using Log = std::function<void(const std::string&)>;

class Engine {
 public:
  static Result<std::unique_ptr<Engine>> open(const EngineOptions& options, Log log);
  virtual ~Engine() = default;

  virtual const ModelSpec& model() const = 0;
  virtual const Plan& plan() const = 0;
  virtual std::string info_json() const = 0;  // one line

  // One request from start to end; nothing else runs. Errors are named by the wire protocol: Code::usage with message
  // "empty_suffix", "ctx_overflow", "bad_request"; Code::io "io_error"; Code::failed "non_finite"; Code::resources
  // "no_memory".
  virtual Result<Outcome> generate(const Request& request, Events& events);

  // Requests that advance together, each with the tokens, and the errors, that it has alone. While some run, score(),
  // logits(), reset() and idle() are not to be called.
  // Whether start() may be called for this conversation: it is not in use, and fewer than PlanOptions::sessions run.
  virtual bool room_for(const std::string& session) const = 0;
  // Errors: those that generate() finds before it computes anything. `events` lives until the request has ended.
  virtual Status start(const Request& request, Events& events) = 0;
  struct Ended {
    Events* events;
    Result<Outcome> outcome;
  };
  // Computes one pass for all that run, and appends those that have ended. False: nothing could be done, as all of them
  // wait for a mask, or none runs. Does not throw: a request without memory ends with Code::resources.
  virtual bool step(std::vector<Ended>* ended) = 0;

  // Log-probability of ids[i] given ids[0..i), natural log, for i in 1..n-1, and the `top` most likely in its place.
  // Uses and replaces the session's state.
  virtual Result<std::vector<TokenEvent>> score(const std::vector<int32_t>& ids, uint32_t top, Events& events) = 0;

  // Logits of every position, [ids, vocab] row-major, from a cold start: for the conformance tests and gates. The first
  // `prefill` ids are computed in chunks, the rest one at a time as decode does.
  virtual Result<std::vector<float>> logits(const std::vector<int32_t>& ids, size_t prefill) = 0;
  // The experts chosen at each (position, MoE layer) of the last call, [positions, moe_layers, top_k].
  virtual std::vector<int32_t> route_trace() const = 0;

  virtual void reset() = 0;  // drop every session
  // Between requests: a slice of upkeep (warming the cache, giving memory back, keeping the history), some milliseconds
  // at most. True: there is more to do at once; false: call again after a quarter of a second.
  virtual bool idle() { return false; }
  virtual std::vector<ColumnSum> column_sums() const { return {}; }  // since it was opened with watch_columns
  virtual Buckets buckets() const = 0;
};

}  // namespace smoe
