#include "serve.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
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
  std::deque<std::vector<uint8_t>> masks;  // these two under Queue's lock
  bool mask_refused = false;

  size_t bytes() const {
    const Request& r = command.request;
    return sizeof(Job) + (r.ids.capacity() + r.stop_ids.capacity()) * sizeof(int32_t) +
           r.bias.capacity() * sizeof(r.bias[0]);
  }
};

// What is read and not yet answered, oldest first.
class Queue {
 public:
  // Waits while the queue is full.
  void push(std::shared_ptr<Job> job) {
    std::unique_lock lock(mutex_);
    changed_.wait(
        lock, [&] { return closed_ || (jobs_.size() < kMaxQueued && (jobs_.empty() || bytes_ < kMaxQueuedBytes)); });
    bytes_ += job->bytes();
    jobs_.push_back(std::move(job));
    changed_.notify_all();
  }

  void cancel_oldest() {
    std::lock_guard lock(mutex_);
    if (jobs_.empty()) return;
    jobs_.front()->cancelled = true;
    changed_.notify_all();
  }

  void add_mask(std::vector<uint8_t> bits) {
    std::lock_guard lock(mutex_);
    if (jobs_.empty() || !jobs_.back()->command.request.mask) return;
    Job& job = *jobs_.back();
    if (bits.empty() || job.masks.size() >= kMaxMasks) job.mask_refused = true;
    if (!job.mask_refused) job.masks.push_back(std::move(bits));
    changed_.notify_all();
  }

  // No more input (and no more room to wait for, if the output is gone).
  void close() {
    std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

  // The oldest job, which stays in the queue until pop(), so that CANCEL finds it; null at the end. False: neither came
  // in time.
  bool wait_front(std::chrono::milliseconds most, std::shared_ptr<Job>* job) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, most, [&] { return closed_ || !jobs_.empty(); })) return false;
    *job = jobs_.empty() ? nullptr : jobs_.front();
    return true;
  }

  // Before the reply's last word: a CANCEL that the client sends after that word must find the next request, or
  // nothing.
  void pop() {
    std::lock_guard lock(mutex_);
    bytes_ -= jobs_.front()->bytes();
    jobs_.pop_front();
    changed_.notify_all();
  }

  bool wait_mask(Job& job, std::vector<uint8_t>* bits) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return closed_ || job.cancelled || job.mask_refused || !job.masks.empty(); });
    if (job.cancelled || job.mask_refused || job.masks.empty()) return false;
    *bits = std::move(job.masks.front());
    job.masks.pop_front();
    return true;
  }

  bool mask_refused(Job& job) {
    std::lock_guard lock(mutex_);
    return job.mask_refused;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> jobs_;
  size_t bytes_ = 0;
  bool closed_ = false;
};

// A reply as it is written. Words are collected in one buffer, which is written out at each event.
class Reply final : public Events {
 public:
  Reply(Wire& wire, const Log& log, const Request& request, std::shared_ptr<Job> job, Queue* queue)
      : wire_(wire), log_(log), request_(request), job_(std::move(job)), queue_(queue) {}

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
    append_token(&words, token, request_);
    flush();
  }
  void on_warning(const char* text) override { log_(std::string("warning: ") + text); }
  bool cancelled() override { return !alive_ || (job_ && job_->cancelled); }
  MaskAnswer next_mask(std::vector<uint8_t>* bits) override {
    return alive_ && queue_ && queue_->wait_mask(*job_, bits) ? MaskAnswer::ready : MaskAnswer::cancel;
  }

  bool begun() const { return begun_; }
  bool flush() {
    if (alive_ && !words.empty()) alive_ = wire_.write(words);
    words.clear();
    return alive_;
  }

  std::string words;

 private:
  Wire& wire_;
  const Log& log_;
  const Request& request_;
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
  const std::string what = status.message() == name ? "" : status.message();
  log("request refused: " + name + (what.empty() ? "" : ": " + what) +
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

Status generate(Engine& engine, const Request& request, Reply& reply, const ServeOptions& options, const Log& log) {
  SMOE_ASSIGN(const Outcome outcome, engine.generate(request, reply));
  append_outcome(&reply.words, outcome);
  if (options.instrument) log_buckets(engine.buckets(), outcome.counters, log);
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
  if (command.verb == Verb::cancel) return queue.cancel_oldest();
  if (command.verb == Verb::mask) return queue.add_mask(std::move(command.mask));
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

// Waits for a request; the engine does its upkeep meanwhile. Null at the end.
std::shared_ptr<Job> next_job(Queue& queue, Engine& engine) {
  using std::chrono::milliseconds;
  std::shared_ptr<Job> job;
  for (bool busy = true; !queue.wait_front(milliseconds(busy ? 0 : 250), &job);) busy = engine.idle();
  return job;
}

}  // namespace

Status serve(Engine& engine, Wire& wire, const ServeOptions& options, const Log& log) {
  Queue queue;
  std::thread reader([&] { read_lines(wire, queue, engine, options.defaults); });
  bool alive = true;
  while (alive) {
    const std::shared_ptr<Job> job = next_job(queue, engine);
    if (!job) break;
    Reply reply(wire, log, job->command.request, job, &queue);
    Status status = run(engine, job->command, reply, options, log);
    if (queue.mask_refused(*job)) {
      status = {Code::usage, "bad_request",
                "a MASK that is not base64 of one bit per id, or more than 64 of them ahead"};
      reply.words.clear();
    }
    queue.pop();
    finish(status, engine, job->command, reply, log);
    alive = reply.flush();
  }
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
  Reply reply(wire, log, command.request, nullptr, nullptr);
  const Status status = run(engine, command, reply, options, log);
  finish(status, engine, command, reply, log);
  if (!reply.flush()) return {Code::io, "the output is closed"};
  return status;
}

}  // namespace smoe
