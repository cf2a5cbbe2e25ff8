// The engine itself, for the conformance tests and the gates. Options are the launch flags of smoe-engine, read by the
// same code.
#include "smoe/engine.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <optional>

#include "bindings/bindings.h"
#include "bindings/launch_flags.h"
#include "bindings/sampling_args.h"
#include "core/options.h"
#include "kernels/kernels.h"

namespace py = pybind11;

namespace smoe {
namespace {

// Collects a reply; ends it after `cancel_after` tokens.
struct Collector : Events {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  std::vector<std::vector<std::pair<int32_t, float>>> top;
  std::vector<std::string> warnings;
  size_t cancel_after = ~size_t{0};

  void on_token(const TokenEvent& token) override {
    ids.push_back(token.id);
    logprobs.push_back(token.logprob);
    top.push_back(token.top);
  }
  void on_warning(const char* text) override { warnings.emplace_back(text); }
  bool cancelled() override { return ids.size() >= cancel_after; }
};

py::dict outcome_dict(const Outcome& outcome, const Collector& events) {
  const Counters& n = outcome.counters;
  py::dict d;
  d["finish"] = outcome.finish == Finish::stop ? "stop" : outcome.finish == Finish::length ? "length" : "cancel";
  d["prompt_tokens"] = n.prompt_tokens;
  d["cached_tokens"] = n.cached_tokens;
  d["generated_tokens"] = n.generated_tokens;
  d["drafted_tokens"] = n.drafted_tokens;
  d["accepted_tokens"] = n.accepted_tokens;
  d["prefill_ms"] = n.prefill_ms;
  d["decode_ms"] = n.decode_ms;
  d["wait_ms"] = n.wait_ms;
  d["hits"] = n.hits;
  d["misses"] = n.misses;
  d["read_bytes"] = n.read_bytes;
  d["guessed"] = n.guessed;
  d["guessed_right"] = n.guessed_right;
  d["logprobs"] = events.logprobs;
  d["top"] = events.top;
  d["warnings"] = events.warnings;
  return d;
}

// A reply that is made beside others: what has come of it, how it ended, and the masks it is to obey.
struct Running final : Collector {
  uint32_t prompt_done = 0;
  std::deque<std::vector<uint8_t>> masks;
  std::optional<Result<Outcome>> result;

  void on_prefill(uint32_t done, uint32_t) override { prompt_done = done; }
  MaskAnswer next_mask(std::vector<uint8_t>* bits) override {
    if (masks.empty()) return MaskAnswer::pending;
    *bits = std::move(masks.front());
    masks.pop_front();
    return MaskAnswer::ready;
  }
  void add_mask(const py::bytes& bits) {
    const auto text = static_cast<std::string_view>(bits);
    masks.emplace_back(text.begin(), text.end());
  }
  // Raises what the request failed of; None before its end.
  py::object outcome() const {
    if (!result) return py::none();
    if (!result->is_ok()) raise(result->status());
    return outcome_dict(result->value(), *this);
  }
};

// Runs f without Python's lock; every call into the engine goes through here.
template <class F>
auto unlocked(F&& f) {
  py::gil_scoped_release release;
  return f();
}

class PyEngine {
 public:
  PyEngine(const std::string& path, bool watch_columns, const py::kwargs& options) {
    std::vector<std::string> flags = launch_flags(options);
    flags.insert(flags.begin(), {"--vault=" + path, "--serve"});
    Launch launch = check(parse_launch({flags.begin(), flags.end()}));
    launch.engine.watch_columns = watch_columns;
    engine_ = check(unlocked([&]() -> Result<std::unique_ptr<Engine>> {
      SMOE_TRY(resolve_window(&launch));
      return Engine::open(launch.engine, [this](const std::string& text) { notices_.push_back(text); });
    }));
  }

  py::array_t<float> logits(const std::vector<int32_t>& ids, std::optional<size_t> prefill) {
    const size_t count = prefill.value_or(ids.size());
    return array(check(unlocked([&] { return engine_->logits(ids, count); })),
                 {static_cast<py::ssize_t>(ids.size()), static_cast<py::ssize_t>(engine_->model().vocab)});
  }

  py::array_t<int32_t> route_trace() const {
    const py::ssize_t layers = engine_->model().moe_layers(), top_k = engine_->model().max_top_k();
    std::vector<int32_t> trace = engine_->route_trace();
    const py::ssize_t row = layers * top_k, positions = row ? static_cast<py::ssize_t>(trace.size()) / row : 0;
    return array(std::move(trace), {positions, layers, top_k});
  }

  std::pair<std::vector<int32_t>, py::dict> generate(const std::vector<int32_t>& ids, uint32_t max_tokens,
                                                     std::optional<size_t> cancel_after, const py::kwargs& sampling) {
    Request request = request_from(sampling);
    request.ids = ids;
    request.max_tokens = max_tokens;
    Collector events;
    if (cancel_after) events.cancel_after = *cancel_after;
    const Outcome outcome = check(unlocked([&] { return engine_->generate(request, events); }));
    return {events.ids, outcome_dict(outcome, events)};
  }

  std::shared_ptr<Running> start(const std::vector<int32_t>& ids, uint32_t max_tokens, const py::kwargs& sampling) {
    Request request = request_from(sampling);
    request.ids = ids;
    request.max_tokens = max_tokens;
    if (!engine_->room_for(request.session)) raise({Code::usage, "no room for another request"});
    auto events = std::make_shared<Running>();
    const Status status = engine_->start(request, *events);
    if (!status.is_ok()) raise(status);
    running_.push_back(events);
    return events;
  }

  bool step() {
    std::vector<Engine::Ended> ended;
    const bool advanced = unlocked([&] { return engine_->step(&ended); });
    for (const Engine::Ended& one : ended) {
      const auto at =
          std::find_if(running_.begin(), running_.end(), [&](const auto& r) { return r.get() == one.events; });
      (*at)->result = one.outcome;
      running_.erase(at);
    }
    return advanced;
  }

  py::array_t<float> score(const std::vector<int32_t>& ids) {
    Collector events;
    std::vector<float> logprobs;
    for (const TokenEvent& token : check(unlocked([&] { return engine_->score(ids, 0, events); })))
      logprobs.push_back(token.logprob);
    const auto count = static_cast<py::ssize_t>(logprobs.size());
    return array(std::move(logprobs), {count});
  }

  bool idle() {
    return unlocked([&] { return engine_->idle(); });
  }
  py::object info() const { return py::module_::import("json").attr("loads")(engine_->info_json()); }
  py::dict plan() const { return plan_dict(engine_->model(), engine_->plan()); }
  void reset() { engine_->reset(); }
  std::vector<std::string> notices() const { return notices_; }

  // name -> (sum of squares of each column, rows)
  py::dict column_sums() const {
    py::dict found;
    for (ColumnSum& sum : engine_->column_sums()) {
      const auto cols = static_cast<py::ssize_t>(sum.squares.size());
      found[py::str(sum.name)] = py::make_tuple(array(std::move(sum.squares), {cols}), sum.rows);
    }
    return found;
  }

  std::map<std::string, double> buckets() const {
    const Buckets b = engine_->buckets();
    return {{"attention", b.attention},
            {"router", b.router},
            {"expert_compute", b.expert_compute},
            {"expert_wait", b.expert_wait},
            {"head", b.head},
            {"sampler", b.sampler},
            {"other", b.other}};
  }

 private:
  // Hands the values over without a copy.
  template <class T>
  static py::array_t<T> array(std::vector<T> values, const std::vector<py::ssize_t>& shape) {
    auto* held = new std::vector<T>(std::move(values));
    const py::capsule owner(held, [](void* p) { delete static_cast<std::vector<T>*>(p); });
    return py::array_t<T>(shape, held->data(), owner);
  }

  std::vector<std::string> notices_;
  std::vector<std::shared_ptr<Running>> running_;
  std::unique_ptr<Engine> engine_;
};

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Kernels* k : all_kernels()) {
    if (k->supported()) names.emplace_back(k->name);
  }
  return names;
}

}  // namespace

void bind_engine(py::module_& m) {
  py::class_<Running, std::shared_ptr<Running>>(m, "Running", "A request that advances beside others.")
      .def_readonly("ids", &Running::ids)
      .def_readonly("prompt_done", &Running::prompt_done, "Tokens of the prompt that have been computed.")
      .def_property_readonly("ended", [](const Running& r) { return r.result.has_value(); })
      .def_property_readonly("outcome", &Running::outcome, "As of generate(), None before the end; raises its failure.")
      .def("cancel", [](Running& r) { r.cancel_after = 0; })
      .def("mask", &Running::add_mask, py::arg("bits"), "For the next of its steps, with mask=True.");
  m.def("isas", &isas, "The kernels this CPU can run, by the names --isa takes.");
  py::class_<PyEngine>(
      m, "Engine",
      "Engine(path, **options): options are the launch flags of smoe-engine with underscores (ctx=512, "
      "activations=\"float\", ring=8, verify_reads=True); read_mode is \"auto\", \"direct\" or \"buffered\".")
      .def(py::init<const std::string&, bool, const py::kwargs&>(), py::arg("path"), py::arg("watch_columns") = false)
      .def("logits", &PyEngine::logits, py::arg("ids"), py::arg("prefill") = py::none(),
           "float32 [ids, vocab] from a cold start; the first `prefill` ids in chunks (all by default), the rest one "
           "by one.")
      .def("route_trace", &PyEngine::route_trace, "int32 [positions, moe_layers, top_k] of the last logits().")
      .def("generate", &PyEngine::generate, py::arg("ids"), py::arg("max_tokens"), py::arg("cancel_after") = py::none(),
           "(ids, outcome). Greedy without penalty unless told: temperature top_p top_k min_p repetition_penalty "
           "frequency_penalty presence_penalty seed stop_ids bias session logprobs slide.")
      .def("start", &PyEngine::start, py::arg("ids"), py::arg("max_tokens"),
           "Begins a request that advances with step(), beside others in other sessions; arguments as of generate(), "
           "and "
           "mask=True.")
      .def("step", &PyEngine::step, "One pass for all that run; False: none could be advanced.")
      .def("idle", &PyEngine::idle, "A slice of what the engine does between requests; False: nothing is left to do.")
      .def("score", &PyEngine::score, py::arg("ids"), "float32 [ids - 1]: natural log of p(ids[i] | ids[:i]).")
      .def("info", &PyEngine::info, "What INFO answers.")
      .def("plan", &PyEngine::plan, "The memory plan in force, by the names of _core.plan.")
      .def("column_sums", &PyEngine::column_sums,
           "Since it was opened with watch_columns=True: name -> (float64 [cols] sums of squares of what a matrix was "
           "multiplied with, rows); experts as layers.L.experts.E.input and .middle.")
      .def("reset", &PyEngine::reset, "Drops every conversation.")
      .def("buckets", &PyEngine::buckets, "Milliseconds of the last request by where they went.")
      .def_property_readonly("notices", &PyEngine::notices, "What the engine had to say when it opened, and since.");
}

}  // namespace smoe
