#include "core/options.h"

#include <algorithm>
#include <cctype>

#include "core/draft.h"
#include "core/sampler.h"
#include "experts/policy.h"
#include "util/numbers.h"
#include "vault/vault.h"

namespace smoe {
namespace {

using Text = std::string_view;

// `value` is what the flag takes, for the help and for errors; null: it takes nothing. set() is false for a bad value.
struct Flag {
  Text name;
  const char* value;
  const char* help;
  bool (*set)(Text text, Launch* l);
};

template <class T>
bool number(Text text, T low, T high, T* out) {
  return parse_number(text, out) && *out >= low && *out <= high;
}

template <class T>
bool optional_number(Text text, T low, T high, std::optional<T>* out) {
  return number(text, low, high, &out->emplace());
}

bool set_text(Text text, std::string* out) {
  *out = text;
  return !text.empty();
}

template <class T, size_t N>
bool choose(Text text, const std::pair<Text, T> (&choices)[N], T* out) {
  for (const auto& [name, value] : choices) {
    if (text == name) return *out = value, true;
  }
  return false;
}

bool set_ctx(Text text, Launch* l) {
  l->ctx_max = text == "max";
  return l->ctx_max || number(text, 1u, ~0u, &l->engine.plan.ctx);
}

bool set_budget(Text text, Launch* l) {
  if (text != "auto" && text != "0") return parse_size(text, &l->engine.plan.budget_bytes);
  l->engine.plan.budget_bytes = 0;
  return true;
}

bool set_exempt(Text text, Launch* l) {
  l->engine.penalty_exempt.clear();
  while (!text.empty()) {
    const Text item = text.substr(0, text.find(','));
    if (!number(item, 0, INT32_MAX, &l->engine.penalty_exempt.emplace_back())) return false;
    text.remove_prefix(std::min(text.size(), item.size() + 1));
  }
  return true;
}

bool set_activations(Text text, Launch* l) {
  return choose<bool>(text, {{"int8", false}, {"float", true}}, &l->engine.plan.float_activations);
}

bool set_draft(Text text, Launch* l) {
  l->engine.draft_where_it_wins = text == "auto";
  if (text == "off") return l->engine.draft = 0, true;
  if (text == "auto") return l->engine.draft = kAutoDraft, true;
  if (!text.starts_with("ngram:")) return false;
  return number(text.substr(6), 1u, kMaxDraft, &l->engine.draft);
}

constexpr Flag kFlags[] = {
    {"--vault", "FILE", "the model: a .smoe file", [](Text v, Launch* l) { return set_text(v, &l->engine.vault); }},
    {"--scout", "FILE", "its trunk; default: the .scout.safetensors beside it",
     [](Text v, Launch* l) { return set_text(v, &l->engine.scout); }},
    {"--serve", nullptr, "answer requests on stdin until it ends", [](Text, Launch* l) { return l->serve = true; }},
    {"--tokens-in", "FILE", "answer one request: ids in a file (- is stdin)",
     [](Text v, Launch* l) { return set_text(v, &l->tokens_file); }},
    {"--max-tokens", "N", "tokens to generate for --tokens-in; default 256",
     [](Text v, Launch* l) { return number(v, 1u, ~0u, &l->max_tokens); }},
    {"--raw-ids", nullptr, "ids on stdout, no text: always so, the engine has no tokenizer",
     [](Text, Launch*) { return true; }},
    {"--budget", "SIZE", "memory for the whole process, K M G T; default auto", set_budget},
    {"--ring", "N", "expert slots instead of a budget; 0 = automatic",
     [](Text v, Launch* l) { return number(v, 0u, ~0u, &l->engine.plan.ring_slots); }},
    {"--ctx", "N|max", "window in tokens; default 4096", set_ctx},
    {"--ledger", "FILE", "where engines tell each other what memory they take",
     [](Text v, Launch* l) { return set_text(v, &l->engine.ledger); }},
    {"--sessions", "N", "conversations kept at once, at most 1024; default 1",
     [](Text v, Launch* l) { return number(v, 1u, 1024u, &l->engine.plan.sessions); }},
    {"--chunk", "N", "tokens computed together in prefill, at most 65536; 0 = automatic",
     [](Text v, Launch* l) { return number(v, 0u, 65536u, &l->engine.plan.chunk); }},
    {"--threads", "N", "threads that compute, at most 1024; 0 = what affinity and cgroup allow",
     [](Text v, Launch* l) { return number(v, 0u, 1024u, &l->engine.plan.threads); }},
    {"--workers", "N", "threads that read from disk, at most 64; 0 = automatic",
     [](Text v, Launch* l) { return number(v, 0u, 64u, &l->engine.io_workers); }},
    {"--io", "auto|pread|uring", "how records are read",
     [](Text v, Launch* l) {
       return choose<IoBackend>(
           v, {{"auto", IoBackend::automatic}, {"pread", IoBackend::pread}, {"uring", IoBackend::uring}},
           &l->engine.io);
     }},
    {"--direct", nullptr, "past the page cache, or not at all",
     [](Text, Launch* l) { return l->engine.read_mode = ReadMode::direct, true; }},
    {"--buffered", nullptr, "through the page cache",
     [](Text, Launch* l) { return l->engine.read_mode = ReadMode::buffered, true; }},
    {"--verify-reads", nullptr, "check the checksum of every record read",
     [](Text, Launch* l) { return l->engine.verify_reads = true; }},
    {"--cache-policy", "NAME", "which expert gives way to another: lru, decayed, floors, lfru, least-stale",
     [](Text v, Launch* l) { return make_policy(v, ExpertTable({})).is_ok() && set_text(v, &l->engine.cache_policy); }},
    {"--history", "FILE", "keep how often each expert is used, and start with the most used",
     [](Text v, Launch* l) { return set_text(v, &l->engine.history); }},
    {"--no-warm", nullptr, "leave the cache empty until something is asked for",
     [](Text, Launch* l) { return l->engine.warm = false, true; }},
    {"--trace", "FILE", "write down which experts were asked for, to replay",
     [](Text v, Launch* l) { return set_text(v, &l->engine.trace); }},
    {"--isa", "NAME", "kernels: auto, or one of those this CPU has",
     [](Text v, Launch* l) { return set_text(v, &l->engine.isa); }},
    {"--activations", "int8|float", "arithmetic of matrix products; float is the reference", set_activations},
    {"--kv", "f16|q8|f32", "storage of keys and values",
     [](Text v, Launch* l) {
       return choose<KvType>(v, {{"f16", KvType::f16}, {"q8", KvType::q8}, {"f32", KvType::f32}}, &l->engine.plan.kv);
     }},
    {"--experts-per-token", "N", "fewer experts than the model's own: faster, less exact",
     [](Text v, Launch* l) { return number(v, 1u, ~0u, &l->engine.plan.experts_per_token); }},
    {"--spec", "N", "experts a layer to read ahead on a guess, at most 1024; default 1, 0 = off",
     [](Text v, Launch* l) { return number(v, 0u, 1024u, &l->engine.spec); }},
    {"--draft", "ngram:N|auto|off",
     "guess up to N tokens, at most 15, from the conversation; verified. auto: while it is faster", set_draft},
    {"--temperature", "F", "below 1e-4: greedy; default 0.6",
     [](Text v, Launch* l) { return optional_number(v, 0.0f, FLT_MAX, &l->temperature); }},
    {"--top-p", "F", "1 = off; default 0.95",
     [](Text v, Launch* l) { return optional_number(v, 0.0f, 1.0f, &l->top_p); }},
    {"--top-k", "N", "0 = off, at most 1024; default 50",
     [](Text v, Launch* l) { return optional_number(v, 0u, ~0u, &l->top_k); }},
    {"--min-p", "F", "0 = off; default 0", [](Text v, Launch* l) { return optional_number(v, 0.0f, 1.0f, &l->min_p); }},
    {"--rep-penalty", "F", "1 = off; default 1.1",
     [](Text v, Launch* l) { return optional_number(v, FLT_MIN, FLT_MAX, &l->repetition_penalty); }},
    {"--exempt", "ID,...", "ids the repetition penalty leaves alone", set_exempt},
    {"--seed", "N", "default 1337",
     [](Text v, Launch* l) { return optional_number(v, uint64_t{0}, ~uint64_t{0}, &l->seed); }},
    {"--instrument", nullptr, "on stderr, where each request's time went",
     [](Text, Launch* l) { return l->instrument = true; }},
    {"--version", nullptr, "print the version", [](Text, Launch* l) { return l->version = true; }},
    {"--help", nullptr, "print this", [](Text, Launch* l) { return l->help = true; }},
};

Status usage(std::string message) { return {Code::usage, std::move(message), "--help lists the flags"}; }

Status check_launch(const Launch& l) {
  if (l.help || l.version) return Status::ok();
  if (l.engine.vault.empty()) return usage("no model: --vault FILE is missing");
  if (l.serve == !l.tokens_file.empty()) return usage("give one of --serve and --tokens-in FILE");
  return Status::ok();
}

}  // namespace

bool parse_size(std::string_view text, uint64_t* bytes) {
  uint64_t unit = 1;
  const size_t at = text.empty()
                        ? Text::npos
                        : Text("KMGT").find(static_cast<char>(std::toupper(static_cast<unsigned char>(text.back()))));
  if (at != Text::npos) {
    unit = uint64_t{1} << (10 * (at + 1));
    text.remove_suffix(1);
  }
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed);
  if (error != std::errc() || end != text.data() + text.size() || !(value * static_cast<double>(unit) < 0x1p63))
    return false;
  *bytes = static_cast<uint64_t>(value < 0 ? 0 : value * static_cast<double>(unit));
  return *bytes > 0;
}

Result<Launch> parse_launch(const std::vector<std::string_view>& args) {
  Launch launch;
  launch.engine.plan.threads = 0;
  for (size_t i = 0; i < args.size(); ++i) {
    const Text name = args[i].substr(0, args[i].find('='));
    const auto flag = std::find_if(std::begin(kFlags), std::end(kFlags), [&](const Flag& f) { return f.name == name; });
    if (flag == std::end(kFlags)) return usage("unknown flag " + std::string(args[i]));
    const bool attached = name.size() < args[i].size();
    if (!flag->value) {
      if (attached) return usage(std::string(name) + " takes no value");
      flag->set({}, &launch);
      continue;
    }
    if (!attached && i + 1 == args.size()) return usage(std::string(name) + " needs a value: " + flag->value);
    const Text value = attached ? args[i].substr(name.size() + 1) : args[++i];
    if (!flag->set(value, &launch)) {
      return usage(std::string(name) + " does not take '" + std::string(value) + "': " + flag->value + ", " +
                   flag->help);
    }
  }
  SMOE_TRY(check_launch(launch));
  return launch;
}

Status resolve_window(Launch* launch) {
  if (!launch->ctx_max) return Status::ok();
  SMOE_ASSIGN(const VaultFile vault, open_vault(launch->engine.vault, launch->engine.scout));
  launch->engine.plan.ctx = vault.model.max_positions;
  return Status::ok();
}

Sampling default_sampling(const Launch& l, const GenerationDefaults& vault) {
  Sampling s;
  const auto pick = [](auto flag, auto from_vault, auto fallback) {
    return flag ? *flag : from_vault >= 0 ? static_cast<decltype(fallback)>(from_vault) : fallback;
  };
  s.temperature = pick(l.temperature, vault.temperature, s.temperature);
  s.top_p = pick(l.top_p, vault.top_p, s.top_p);
  s.top_k = std::min(pick(l.top_k, vault.top_k, s.top_k), Sampler::kMaxTopK);
  s.repetition_penalty = pick(l.repetition_penalty, vault.repetition_penalty, s.repetition_penalty);
  s.min_p = l.min_p.value_or(s.min_p);
  s.seed = l.seed.value_or(s.seed);
  return s;
}

std::string launch_help() {
  std::string out = "smoe-engine " SMOE_VERSION
                    ": runs a model from a vault, token ids in, token ids out.\n\n"
                    "  smoe-engine --vault FILE --serve\n  smoe-engine --vault FILE --tokens-in FILE\n\n";
  for (const Flag& f : kFlags) {
    std::string left = "  " + std::string(f.name) + (f.value ? " " + std::string(f.value) : "");
    out += left.append(std::max<size_t>(left.size() + 2, 30) - left.size(), ' ') + f.help + "\n";
  }
  return out;
}

int exit_code(Code code) {
  switch (code) {
    case Code::ok:
      return 0;
    case Code::usage:
      return 2;
    case Code::resources:
      return 3;
    case Code::corrupt:
      return 4;
    case Code::cancelled:
      return 130;
    default:
      return 1;
  }
}

}  // namespace smoe
