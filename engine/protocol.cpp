#include "protocol.h"

#include <algorithm>
#include <array>
#include <cctype>

#include "core/sampler.h"
#include "util/numbers.h"

namespace smoe {
namespace {

constexpr size_t kMaxSessionName = 64, kMaxTag = 32;

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

// Takes the next word off the front of `text`; empty at its end.
std::string_view next_word(std::string_view* text) {
  size_t start = 0;
  while (start < text->size() && is_space((*text)[start])) ++start;
  size_t end = start;
  while (end < text->size() && !is_space((*text)[end])) ++end;
  const std::string_view word = text->substr(start, end - start);
  text->remove_prefix(end);
  return word;
}

// What came in, fit for a log line.
std::string quoted(std::string_view text) {
  std::string out = "'";
  for (char c : text.substr(0, 60)) out += std::isprint(static_cast<unsigned char>(c)) ? c : '?';
  return out + (text.size() > 60 ? "...'" : "'");
}

Status bad(std::string why) { return {Code::usage, "bad_request", std::move(why)}; }

// item(text) for each part between commas; false as soon as one is refused. An empty text has one empty part.
template <class F>
bool each_item(std::string_view text, F&& item) {
  for (size_t comma; (comma = text.find(',')) != text.npos; text.remove_prefix(comma + 1)) {
    if (!item(text.substr(0, comma))) return false;
  }
  return item(text);
}

bool parse_id(std::string_view text, uint32_t vocab, int32_t* out) {
  return parse_number(text, out) && *out >= 0 && static_cast<uint32_t>(*out) < vocab;
}

bool parse_ids(std::string_view text, uint32_t vocab, std::vector<int32_t>* out) {
  out->clear();
  out->reserve(static_cast<size_t>(std::count(text.begin(), text.end(), ',')) + 1);
  return each_item(text, [&](std::string_view item) {
    int32_t id = 0;
    if (!parse_id(item, vocab, &id)) return false;
    out->push_back(id);
    return true;
  });
}

bool parse_bias(std::string_view text, uint32_t vocab, std::vector<std::pair<int32_t, float>>* out) {
  out->clear();
  return each_item(text, [&](std::string_view item) {
    const size_t colon = item.find(':');
    std::pair<int32_t, float> entry;
    if (colon == item.npos || !parse_id(item.substr(0, colon), vocab, &entry.first)) return false;
    if (!parse_number(item.substr(colon + 1), &entry.second)) return false;
    out->push_back(entry);
    return true;
  });
}

bool parse_name(std::string_view text, size_t most, std::string* out) {
  const auto plain = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-' || c == '.';
  };
  if (text.size() > most || !std::all_of(text.begin(), text.end(), plain)) return false;
  *out = text;
  return true;
}

bool parse_switch(std::string_view text, bool* out) {
  *out = text == "1";
  return text == "0" || text == "1";
}

bool parse_seed(std::string_view text, uint64_t* out) {
  int64_t negative = 0;
  if (parse_number(text, out)) return true;
  if (!parse_number(text, &negative)) return false;
  *out = static_cast<uint64_t>(negative);
  return true;
}

bool parse_real(std::string_view text, float low, float high, float* out) {
  return parse_number(text, out) && *out >= low && *out <= high;
}

struct Key {
  std::string_view name;
  bool (*parse)(std::string_view value, uint32_t vocab, Request* r);
};

using Text = std::string_view;
constexpr Key kKeys[] = {
    {"t", [](Text v, uint32_t, Request* r) { return parse_real(v, 0, FLT_MAX, &r->sampling.temperature); }},
    {"p", [](Text v, uint32_t, Request* r) { return parse_real(v, 0, 1, &r->sampling.top_p); }},
    {"k",
     [](Text v, uint32_t, Request* r) {
       if (!parse_number(v, &r->sampling.top_k)) return false;
       r->sampling.top_k = std::min(r->sampling.top_k, Sampler::kMaxTopK);
       return true;
     }},
    {"r",
     [](Text v, uint32_t, Request* r) { return parse_real(v, FLT_MIN, FLT_MAX, &r->sampling.repetition_penalty); }},
    {"min_p", [](Text v, uint32_t, Request* r) { return parse_real(v, 0, 1, &r->sampling.min_p); }},
    {"freq", [](Text v, uint32_t, Request* r) { return parse_number(v, &r->sampling.frequency_penalty); }},
    {"pres", [](Text v, uint32_t, Request* r) { return parse_number(v, &r->sampling.presence_penalty); }},
    {"seed", [](Text v, uint32_t, Request* r) { return parse_seed(v, &r->sampling.seed); }},
    {"stop", [](Text v, uint32_t vocab, Request* r) { return parse_ids(v, vocab, &r->stop_ids); }},
    {"bias", [](Text v, uint32_t vocab, Request* r) { return parse_bias(v, vocab, &r->bias); }},
    {"session", [](Text v, uint32_t, Request* r) { return parse_name(v, kMaxSessionName, &r->session); }},
    {"lp",
     [](Text v, uint32_t, Request* r) {
       r->report_logprobs = true;
       return parse_number(v, &r->logprobs) && r->logprobs <= kMaxLogprobs;
     }},
    {"mask", [](Text v, uint32_t, Request* r) { return parse_switch(v, &r->mask); }},
    {"buckets", [](Text v, uint32_t, Request* r) { return parse_switch(v, &r->report_buckets); }},
    {"slide", [](Text v, uint32_t, Request* r) { return parse_switch(v, &r->slide); }},
};

// [key=value ...] <ids>, to the end of the line.
Status parse_body(std::string_view text, uint32_t vocab, Request* r) {
  std::string_view word;
  for (word = next_word(&text); word.find('=') != word.npos; word = next_word(&text)) {
    const size_t equals = word.find('=');
    const auto key = std::find_if(std::begin(kKeys), std::end(kKeys),
                                  [&](const Key& k) { return k.name == word.substr(0, equals); });
    if (key != std::end(kKeys) && !key->parse(word.substr(equals + 1), vocab, r))
      return bad("the field " + quoted(word));
  }
  if (word.empty()) return {Code::usage, "empty_suffix", "no ids"};
  if (!next_word(&text).empty()) return bad("something follows the ids: they are one word");
  if (!parse_ids(word, vocab, &r->ids)) {
    return bad("the ids " + quoted(word) + ": numbers below " + std::to_string(vocab) + ", separated by commas");
  }
  return Status::ok();
}

Status parse_generate(std::string_view text, uint32_t vocab, Request* r) {
  const std::string_view count = next_word(&text);
  if (!parse_number(count, &r->max_tokens) || !r->max_tokens)
    return bad("max_tokens " + quoted(count) + ": a number above 0");
  return parse_body(text, vocab, r);
}

// The tag of a request, wherever it stands before the ids, so that what is wrong with the rest is told to it. False for
// one that is none.
bool find_tag(std::string_view text, std::string* tag) {
  bool good = true;
  for (bool first = true;; first = false) {
    const std::string_view word = next_word(&text);
    if (word.starts_with("tag=")) good = word.size() > 4 && parse_name(word.substr(4), kMaxTag, tag);
    if (!good || word.empty() || (!first && word.find('=') == word.npos)) return good;
  }
}

// A tag before the rest of a MASK or CANCEL, which begins behind it.
bool take_tag(std::string_view* text, std::string* tag) {
  std::string_view rest = *text;
  const std::string_view word = next_word(&rest);
  if (!word.starts_with("tag=")) return true;
  *text = rest;
  return word.size() > 4 && parse_name(word.substr(4), kMaxTag, tag);
}

Status parse_mask(std::string_view text, uint32_t vocab, Command* command) {
  std::string_view after = text;
  next_word(&after);
  const bool two_words = !next_word(&after).empty();  // "tag=" may be the mask itself
  if (two_words && !take_tag(&text, &command->tag)) return bad("the tag of a MASK");
  const bool good = decode_base64(next_word(&text), &command->mask) && command->mask.size() == (size_t{vocab} + 7) / 8;
  if (!good || !next_word(&text).empty()) command->mask.clear();
  return Status::ok();
}

int base64_value(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  return c == '+' ? 62 : c == '/' ? 63 : -1;
}

constexpr std::string_view kErrors[] = {"bad_request", "empty_suffix", "ctx_overflow", "suffix_too_long",
                                        "io_error",    "non_finite",   "no_memory"};

// name=milliseconds
void append_ms(std::string* out, const char* name, double value) {
  *out += name;
  append_fixed(out, value, 3);
  *out += ' ';
}

}  // namespace

bool decode_base64(std::string_view text, std::vector<uint8_t>* out) {
  out->clear();
  if (text.size() % 4) return false;
  for (int i = 0; i < 2 && !text.empty() && text.back() == '='; ++i) text.remove_suffix(1);
  out->reserve(text.size() * 3 / 4);
  uint32_t bits = 0, held = 0;
  for (char c : text) {
    const int value = base64_value(c);
    if (value < 0) return false;
    bits = bits << 6 | static_cast<uint32_t>(value);
    if ((held += 6) >= 8) out->push_back(static_cast<uint8_t>(bits >> (held -= 8)));
  }
  return true;
}

Command parse_line(std::string_view line, uint32_t vocab, const Sampling& defaults) {
  Command command;
  command.request.sampling = defaults;
  std::string_view rest = line;
  const std::string_view verb = next_word(&rest);
  Status status;
  if (verb == "GEN" || verb == "SCORE") {
    command.verb = verb == "GEN" ? Verb::generate : Verb::score;
    if (!find_tag(rest, &command.tag)) {
      status = bad("the tag: letters, digits, _ - . only, at most " + std::to_string(kMaxTag));
    } else {
      status =
          verb == "GEN" ? parse_generate(rest, vocab, &command.request) : parse_body(rest, vocab, &command.request);
    }
  } else if (verb == "MASK") {
    command.verb = Verb::mask;
    status = parse_mask(rest, vocab, &command);
  } else if (verb == "RESET" || verb == "INFO" || verb == "CANCEL") {
    command.verb = verb == "RESET" ? Verb::reset : verb == "INFO" ? Verb::info : Verb::cancel;
    const bool tagged = command.verb != Verb::cancel || take_tag(&rest, &command.tag);
    if (!tagged || !next_word(&rest).empty()) status = bad(std::string(verb) + " stands alone");
  } else {
    status = bad("the request " + quoted(line) + ": GEN, SCORE, MASK, RESET, INFO or CANCEL");
  }
  if (!status.is_ok()) {
    std::string tag = std::move(command.tag);
    command = {};
    command.tag = std::move(tag);
    command.status = std::move(status);
  }
  return command;
}

Result<std::vector<int32_t>> parse_id_file(std::string_view text, uint32_t vocab) {
  std::vector<int32_t> ids;
  for (std::string_view word = next_word(&text); !word.empty(); word = next_word(&text)) {
    std::vector<int32_t> some;
    if (word.back() == ',') word.remove_suffix(1);  // "1, 2": the comma ends the word
    if (!parse_ids(word, vocab, &some))
      return bad("the ids " + quoted(word) + ": numbers below " + std::to_string(vocab));
    ids.insert(ids.end(), some.begin(), some.end());
  }
  if (ids.empty()) return Status{Code::usage, "empty_suffix", "no ids"};
  return ids;
}

std::string wire_error(const Status& status) {
  const std::string_view name = std::string_view(status.message()).substr(0, status.message().find_first_of(": "));
  if (std::find(std::begin(kErrors), std::end(kErrors), name) != std::end(kErrors)) return std::string(name);
  switch (status.code()) {
    case Code::usage:
      return "bad_request";
    case Code::resources:
      return "no_memory";
    case Code::corrupt:
    case Code::io:
      return "io_error";
    default:
      return "failed";
  }
}

void append_begin(std::string* out, uint32_t prompt_tokens, uint32_t cached_tokens) {
  *out += "prompt=";
  append_number(out, prompt_tokens);
  *out += " cached=";
  append_number(out, cached_tokens);
  *out += ' ';
}

void append_progress(std::string* out, uint32_t done, uint32_t total) {
  *out += "pre=";
  append_number(out, done);
  *out += '/';
  append_number(out, total);
  *out += ' ';
}

void append_logprobs(std::string* out, const TokenEvent& token) {
  *out += "lp=";
  append_number(out, token.logprob);
  *out += ' ';
  for (size_t i = 0; i < token.top.size(); ++i) {
    *out += i ? "," : "top=";
    append_number(out, token.top[i].first);
    *out += ':';
    append_number(out, token.top[i].second);
  }
  if (!token.top.empty()) *out += ' ';
}

void append_token(std::string* out, const TokenEvent& token, const Request& request) {
  append_number(out, token.id);
  *out += ' ';
  if (request.report_logprobs) append_logprobs(out, token);
}

void append_buckets(std::string* out, const Buckets& b) {
  const auto ms = [&](const char* name, double value) { append_ms(out, name, value); };
  ms("attention_ms=", b.attention);
  ms("router_ms=", b.router);
  ms("expert_compute_ms=", b.expert_compute);
  ms("expert_wait_ms=", b.expert_wait);
  ms("head_ms=", b.head);
  ms("sampler_ms=", b.sampler);
  ms("other_ms=", b.other);
}

void append_outcome(std::string* out, const Outcome& outcome) {
  const Counters& n = outcome.counters;
  const auto count = [&](const char* name, uint64_t value) {
    *out += name;
    append_number(out, value);
    *out += ' ';
  };
  const auto ms = [&](const char* name, double value) { append_ms(out, name, value); };
  count("gen=", n.generated_tokens);
  ms("prefill_ms=", n.prefill_ms);
  ms("decode_ms=", n.decode_ms);
  count("hits=", n.hits);
  count("misses=", n.misses);
  count("bytes=", n.read_bytes);
  ms("wait_ms=", n.wait_ms);
  if (n.drafted_tokens != 0) {
    count("drafted=", n.drafted_tokens);
    count("accepted=", n.accepted_tokens);
  }
  if (outcome.buckets) {
    append_buckets(out, *outcome.buckets);
    count("guessed=", n.guessed);
    count("guessed_right=", n.guessed_right);
  }
  *out += outcome.finish == Finish::stop     ? "fin=stop "
          : outcome.finish == Finish::length ? "fin=length "
                                             : "fin=cancel ";
}

void LineSplitter::keep(std::string_view part) {
  if (held_.size() + part.size() > max_) {
    too_long_ = true;
    held_.clear();
    held_.shrink_to_fit();
  }
  if (!too_long_) held_ += part;
}

}  // namespace smoe
