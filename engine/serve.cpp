#include "serve.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <new>
#include <thread>

#include "protocol.h"
#include "util/numbers.h"

namespace smoe {
namespace {

constexpr size_t kMaxMasks = 64;  // of one request, sent ahead of its steps

Status out_of_memory() { return {Code::resources, "no_memory", "an allocation failed while handling the request"}; }

struct Job {
  Command command;
  std::atomic<bool> cancelled = false;
  bool begun = false;                      // of the loop's thread
  std::deque<std::vector<uint8_t>> masks;  // these two under Queue's lock
  bool mask_refused = false;

  size_t bytes() const {
    const Request& r = command.request;
    return sizeof(Job) + (r.ids.capacity() + r.stop_ids.capacity()) * sizeof(int32_t) +
           r.bias.capacity() * sizeof(r.bias[0]);
  }
};

// What is read and not yet answered, oldest first: requests stay until pop(), so that CANCEL finds them.
class Queue {
 public:
  // Waits while the queue is full.
  void push(std::shared_ptr<Job> job) {
    std::unique_lock lock(mutex_);
    changed_.wait(
        lock, [&] { return closed_ || (jobs_.size() < kMaxQueued && (jobs_.empty() || bytes_ < kMaxQueuedBytes)); });
    bytes_ += job->bytes();
    jobs_.push_back(std::move(job));
    change();
  }

  void cancel_oldest(const std::string& tag) {
    std::lock_guard lock(mutex_);
    const auto job = std::find_if(jobs_.begin(), jobs_.end(), [&](auto& j) { return j->command.tag == tag; });
    if (job == jobs_.end()) return;
    (*job)->cancelled = true;
    change();
  }

  void add_mask(const std::string& tag, std::vector<uint8_t> bits) {
    std::lock_guard lock(mutex_);
    const auto last = std::find_if(jobs_.rbegin(), jobs_.rend(), [&](auto& j) { return j->command.tag == tag; });
    if (last == jobs_.rend() || !(*last)->command.request.mask) return;
    Job& job = **last;
    if (bits.empty() || job.masks.size() >= kMaxMasks) job.mask_refused = true;
    if (!job.mask_refused) job.masks.push_back(std::move(bits));
    change();
  }

  // No more input (and no more room to wait for, if the output is gone).
  void close() {
    std::lock_guard lock(mutex_);
    closed_ = true;
    change();
  }

  // The oldest job that has not begun; null if there is none.
  std::shared_ptr<Job> next() {
    std::lock_guard lock(mutex_);
    const auto job = std::find_if(jobs_.begin(), jobs_.end(), [](auto& j) { return !j->begun; });
    return job == jobs_.end() ? nullptr : *job;
  }
  // The oldest job that may begin beside those that have: it has a tag, there is room for its conversation, and none
  // before it has the same tag, or waits for the same conversation; those before it that wait may be overtaken, but not
  // one that runs alone. Null if there is none.
  std::shared_ptr<Job> next_beside(const std::function<bool(const Command&)>& beside,
                                   const std::function<bool(const std::string&)>& room) {
    std::lock_guard lock(mutex_);
    for (auto job = jobs_.begin(); job != jobs_.end(); ++job) {
      const Command& c = (*job)->command;
      if ((*job)->begun) continue;
      if (!beside(c)) return nullptr;
      const bool first = std::none_of(jobs_.begin(), job, [&](auto& j) {
        return j->command.tag == c.tag || (!j->begun && j->command.request.session == c.request.session);
      });
      if (first && room(c.request.session)) return *job;
    }
    return nullptr;
  }
  // Waits for a job, or the end: false if neither came in time.
  bool wait_job(std::chrono::milliseconds most) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, most, [&] { return closed_ || !jobs_.empty(); });
  }

  // Before the reply's last word: a CANCEL that the client sends after that word must find the next request, or
  // nothing.
  void pop(const std::shared_ptr<Job>& job) {
    std::lock_guard lock(mutex_);
    bytes_ -= job->bytes();
    jobs_.erase(std::find(jobs_.begin(), jobs_.end(), job));
    change();
  }

  // A number that differs after every change, and a wait for the next one.
  uint64_t version() {
    std::lock_guard lock(mutex_);
    return version_;
  }
  void wait_after(uint64_t version) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return version_ != version; });
  }

  MaskAnswer take_mask(Job& job, std::vector<uint8_t>* bits) {
    std::lock_guard lock(mutex_);
    if (job.cancelled || job.mask_refused) return MaskAnswer::cancel;
    if (job.masks.empty()) return closed_ ? MaskAnswer::cancel : MaskAnswer::pending;
    *bits = std::move(job.masks.front());
    job.masks.pop_front();
    return MaskAnswer::ready;
  }
  void wait_mask(Job& job) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return closed_ || job.cancelled || job.mask_refused || !job.masks.empty(); });
  }
  bool mask_refused(Job& job) {
    std::lock_guard lock(mutex_);
    return job.mask_refused;
  }

 private:
  void change() {
    ++version_;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> jobs_;
  size_t bytes_ = 0;
  uint64_t version_ = 0;
  bool closed_ = false;
};

// A reply as it is written. Words are collected in one buffer, which is written out at each event: as they are, or for
// a request with a tag as a line of its own.
class Reply final : public Events {
 public:
  Reply(Wire& wire, const Log& log, const Command& command, std::shared_ptr<Job> job, Queue* queue)
      : wire_(wire), log_(log), command_(command), job_(std::move(job)), queue_(queue) {}

  void on_begin(uint32_t prompt, uint32_t cached) override {
    begun_ = true;
    append_begin(&words, prompt, cached);
    flush();
  }
  void on_prefill(uint32_t done, uint32_t total) override {
    append_progress(&words, done, total);
    flush();
  }
  void on_token(const TokenEvent& token) override {
    append_token(&words, token, command_.request);
    flush();
  }
  void on_warning(const char* text) override { log_(std::string("warning: ") + text); }
  bool cancelled() override { return !alive_ || (job_ && job_->cancelled); }
  MaskAnswer next_mask(std::vector<uint8_t>* bits) override {
    return alive_ && queue_ ? queue_->take_mask(*job_, bits) : MaskAnswer::cancel;
  }
  void wait() override { queue_->wait_mask(*job_); }

  const std::shared_ptr<Job>& job() const { return job_; }
  const std::string& tag() const { return command_.tag; }
  bool begun() const { return begun_; }
  bool flush() {
    if (alive_ && !words.empty()) {
      if (!command_.tag.empty()) frame();
      alive_ = wire_.write(words);
    }
    words.clear();
    return alive_;
  }

  std::string words;

 private:
  void frame() {
    words.insert(0, "@" + command_.tag + " ");
    if (words.back() != '\n') words.back() = '\n';
  }

  Wire& wire_;
  const Log& log_;
  const Command& command_;
  const std::shared_ptr<Job> job_;
  Queue* const queue_;
  bool alive_ = true, begun_ = false;
};

void append_error(const Status& status, const Engine& engine, const Request& request, Reply& reply, const Log& log) {
  const std::string name = wire_error(status);
  if (name == "ctx_overflow") {
    if (!reply.begun()) (reply.words += "prompt=", append_number(&reply.words, request.ids.size()), reply.words += ' ');
    (reply.words += "ctx=", append_number(&reply.words, engine.plan().ctx), reply.words += ' ');
  }
  reply.words += "<<ERR " + name + ">>\n";
  const std::string& tag = reply.tag();
  const std::string what = status.message() == name ? "" : status.message();
  log("request refused: " + (tag.empty() ? "" : "@" + tag + " ") + name + (what.empty() ? "" : ": " + what) +
      (status.hint().empty() ? "" : ": " + status.hint()));
}

void log_buckets(const Buckets& b, const Counters& n, const Log& log) {
  std::string line = "instrument:";
  const auto add = [&](const char* name, auto value) { (line += name, append_number(&line, value)); };
  const auto ms = [&](const char* name, double value) { (line += name, append_fixed(&line, value, 3)); };
  add(" prompt=", n.prompt_tokens), add(" cached=", n.cached_tokens), add(" gen=", n.generated_tokens);
  ms(" prefill_ms=", n.prefill_ms), ms(" decode_ms=", n.decode_ms);
  line += ' ';
  append_buckets(&line, b);
  add("guessed=", n.guessed), add(" guessed_right=", n.guessed_right);
  log(line);
}

void append_reply(const Outcome& outcome, const Engine& engine, Reply& reply, const ServeOptions& options,
                  const Log& log) {
  append_outcome(&reply.words, outcome);
  if (options.instrument) log_buckets(engine.buckets(), outcome.counters, log);
}

Status generate(Engine& engine, const Request& request, Reply& reply, const ServeOptions& options, const Log& log) {
  SMOE_ASSIGN(const Outcome outcome, engine.generate(request, reply));
  append_reply(outcome, engine, reply, options, log);
  return Status::ok();
}

Status score(Engine& engine, const Request& request, Reply& reply) {
  const auto start = std::chrono::steady_clock::now();
  const Result<std::vector<TokenEvent>> result = engine.score(request.ids, request.logprobs, reply);
  if (result.status().code() == Code::cancelled) {
    reply.words += "fin=cancel ";
    return Status::ok();
  }
  SMOE_TRY(result.status());
  for (const TokenEvent& token : result.value()) append_logprobs(&reply.words, token);
  reply.words += "gen=0 prefill_ms=";
  append_fixed(&reply.words,
               std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count(), 3);
  reply.words += ' ';
  return Status::ok();
}

Status run(Engine& engine, const Command& command, Reply& reply, const ServeOptions& options, const Log& log) try {
  switch (command.verb) {
    case Verb::generate:
      return generate(engine, command.request, reply, options, log);
    case Verb::score:
      return score(engine, command.request, reply);
    case Verb::reset:
      engine.reset();
      return Status::ok();
    case Verb::info:
      reply.words += engine.info_json();
      return Status::ok();
    default:
      return command.status;
  }
} catch (const std::bad_alloc&) {
  return out_of_memory();
} catch (const std::exception& error) {  // the engine throws nothing of its own: a fault of the library below it
  return {Code::failed, "failed", error.what()};
}

void finish(const Status& status, const Engine& engine, const Command& command, Reply& reply, const Log& log) {
  if (!status.is_ok()) {
    append_error(status, engine, command.request, reply, log);
  } else {
    reply.words += command.verb == Verb::info ? "\n" : "<<DONE>>\n";
  }
}

void dispatch(Queue& queue, Command command) {
  if (command.verb == Verb::cancel) return queue.cancel_oldest(command.tag);
  if (command.verb == Verb::mask) return queue.add_mask(command.tag, std::move(command.mask));
  auto job = std::make_shared<Job>();
  job->command = std::move(command);
  queue.push(std::move(job));
}

void read_lines(Wire& wire, Queue& queue, const Engine& engine, const Sampling& defaults) {
  const uint32_t vocab = engine.model().vocab;
  const size_t max_line = max_line_bytes(engine.plan().ctx);
  LineSplitter splitter(max_line);
  std::vector<char> buffer(64 << 10);
  const auto on_line = [&](std::string_view line, bool too_long) {
    Command command;
    try {
      command = parse_line(line, vocab, defaults);
    } catch (const std::bad_alloc&) {
      command = {};
      command.status = out_of_memory();
    }
    if (too_long)
      command.status = {Code::usage, "bad_request", "a line of more than " + std::to_string(max_line) + " bytes"};
    dispatch(queue, std::move(command));
  };
  while (const size_t n = wire.read(buffer.data(), buffer.size())) splitter.feed({buffer.data(), n}, on_line);
  splitter.finish(on_line);
  queue.close();
}

// The loop: requests begin in their order, those with a tag beside one another and past those whose conversation is in
// use.
class Loop {
 public:
  Loop(Engine& engine, Wire& wire, const ServeOptions& options, const Log& log, Queue& queue)
      : engine_(engine), wire_(wire), options_(options), log_(log), queue_(queue) {}

  // Until the input has ended and all is answered, or nobody reads the output any more: false then.
  bool run() {
    while (alive_) {
      const uint64_t version = queue_.version();
      bool began = false;
      while (alive_ && begin_next()) began = true;
      if (!running_.empty()) {
        if (!advance() && !began) queue_.wait_after(version);
      } else if (!began && !wait()) {
        return true;
      }
    }
    return false;
  }

 private:
  static bool runs_beside_others(const Command& c) { return c.verb == Verb::generate && !c.tag.empty(); }

  // False: there is nothing to begin now.
  bool begin_next() {
    std::shared_ptr<Job> job = queue_.next();
    if (!job) return false;
    if (!runs_beside_others(job->command)) {
      if (!running_.empty()) return false;
      job->begun = true;
      Reply reply(wire_, log_, job->command, job, &queue_);
      answer(reply, smoe::run(engine_, job->command, reply, options_, log_));
      return true;
    }
    job = queue_.next_beside(runs_beside_others, [this](const std::string& s) { return engine_.room_for(s); });
    if (!job) return false;
    job->begun = true;
    auto reply = std::make_unique<Reply>(wire_, log_, job->command, job, &queue_);
    const Status status = start(*reply);
    if (status.is_ok()) {
      running_.push_back(std::move(reply));
    } else {
      answer(*reply, status);
    }
    return true;
  }

  Status start(Reply& reply) try {
    return engine_.start(reply.job()->command.request, reply);
  } catch (const std::bad_alloc&) {
    return out_of_memory();
  }

  // One pass. False: nothing could be done.
  bool advance() {
    ended_.clear();
    const bool advanced = engine_.step(&ended_);
    for (const Engine::Ended& one : ended_) {
      const auto at = std::find_if(running_.begin(), running_.end(), [&](auto& r) { return r.get() == one.events; });
      if (one.outcome.is_ok()) append_reply(one.outcome.value(), engine_, **at, options_, log_);
      answer(**at, one.outcome.status());
      running_.erase(at);
    }
    return advanced;
  }

  void answer(Reply& reply, Status status) {
    if (queue_.mask_refused(*reply.job())) {
      status = {Code::usage, "bad_request",
                "a MASK that is not base64 of one bit per id, or more than 64 of them ahead"};
      reply.words.clear();
    }
    queue_.pop(reply.job());
    finish(status, engine_, reply.job()->command, reply, log_);
    alive_ = reply.flush() && alive_;
  }

  // For a request; the engine does its upkeep meanwhile. False at the end.
  bool wait() {
    using std::chrono::milliseconds;
    for (bool busy = true; !queue_.wait_job(milliseconds(busy ? 0 : 250));) busy = engine_.idle();
    return queue_.next() != nullptr;
  }

  Engine& engine_;
  Wire& wire_;
  const ServeOptions& options_;
  const Log& log_;
  Queue& queue_;
  std::vector<std::unique_ptr<Reply>> running_;
  std::vector<Engine::Ended> ended_;
  bool alive_ = true;
};

}  // namespace

Status serve(Engine& engine, Wire& wire, const ServeOptions& options, const Log& log) {
  Queue queue;
  std::thread reader([&] { read_lines(wire, queue, engine, options.defaults); });
  const bool alive = Loop(engine, wire, options, log, queue).run();
  queue.close();
  wire.stop();
  reader.join();
  if (!alive) return {Code::io, "the output is closed", "whoever started the engine no longer reads its replies"};
  return Status::ok();
}

Status run_once(Engine& engine, Wire& wire, const Request& request, const ServeOptions& options, const Log& log) {
  Command command;
  command.verb = Verb::generate;
  command.request = request;
  Reply reply(wire, log, command, nullptr, nullptr);
  const Status status = run(engine, command, reply, options, log);
  finish(status, engine, command, reply, log);
  if (!reply.flush()) return {Code::io, "the output is closed"};
  return status;
}

}  // namespace smoe
