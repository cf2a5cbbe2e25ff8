// The wire protocol of `smoe-engine --serve`: lines <-> structs. The loop that speaks it is in serve.h.
//
// Requests, one line each (at most max_line_bytes() long):
//   GEN <max_tokens> [key=value ...] <id0>,<id1>,...   the whole conversation, every time
//       t p k r min_p freq pres seed   sampling for this request; what is missing comes from the launch flags
//       stop=1,2   bias=id:f,...   session=NAME   slide=0   lp=K   mask=1   buckets=1
//       The first field without `=` starts the ids. Unknown keys are ignored; of a repeated key the last one counts.
//   MASK <base64>   with mask=1, one before each step: ceil(vocab / 8) bytes, one bit per id, LSB first, 1 = allowed.
//       Belongs to the last GEN line; without one that waits for masks it is dropped.
//   SCORE [key=value ...] <ids>   log-probability of each id given those before it
//   RESET   INFO   CANCEL
//   With tag=NAME (letters, digits, _ - . , at most 32), a key of GEN and SCORE, requests need not wait for one
//   another. GENs with a tag run together, as many as there are --sessions, each in another session (session= left out
//   names one, too). They begin in the order they came in, but pass those whose session or tag is still in use; what
//   has no tag waits for those before it and holds up those behind it, as SCORE does. `MASK tag=NAME <base64>` and
//   `CANCEL tag=NAME` are for the request of that tag, which is one at a time. Every line of a tagged request's reply
//   is `@NAME words`, written at once; together, without the @NAME, they are a reply as below.
//
// Replies, in the order of the requests: words separated by white space, each written out at once, a newline at the
// end.
//   GEN    prompt=N cached=N  pre=done/total ...  id ...
//          gen= prefill_ms= decode_ms= hits= misses= bytes= wait_ms=  fin=stop|length|cancel <<DONE>>
//          With buckets=1, before fin=: attention_ms= router_ms= expert_compute_ms= expert_wait_ms= head_ms=
//          sampler_ms= other_ms=, together prefill_ms + decode_ms, and guessed= guessed_right=, records read ahead.
//          With lp=K each id is followed by lp=<float> and, for K > 0, top=id:lp,... best first: natural logarithms of
//          the distribution before sampling touched it. The id that ends a reply (EOS, stop=) is neither printed nor
//          evaluated.
//   SCORE  pre=done/total ...  lp=<float> for ids 1 .. n-1, with lp=K above 0 each followed by top=id:lp,... as in GEN
//          gen=0 prefill_ms= <<DONE>>. If cancelled: fin=cancel <<DONE>>.
//   RESET  <<DONE>>
//   INFO   one line of JSON, nothing else
//   CANCEL nothing: it ends the oldest request (of that tag) that has no complete reply yet; when idle it does nothing
//   error  fields such as prompt= ctx=, then <<ERR name>> in place of <<DONE>>. Before it, one line on stderr says what
//          was wrong: `request refused: [@NAME ]name: ...`. Names: bad_request empty_suffix ctx_overflow
//          suffix_too_long io_error non_finite no_memory failed
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "smoe/session.h"
#include "smoe/status.h"

namespace smoe {

// Room for a prompt of four windows of seven-digit ids, and for 1 MiB of whatever else: what is read is held beside
// what the memory plan counts, so it stays small against it.
inline constexpr size_t max_line_bytes(uint32_t ctx) { return (size_t{1} << 20) + size_t{32} * ctx; }
inline constexpr uint32_t kMaxLogprobs = 1024;

enum class Verb { generate, score, reset, info, cancel, mask, malformed };

struct Command {
  Verb verb = Verb::malformed;
  std::string tag;            // generate, score, cancel, mask; "" = none
  Request request;            // generate, score
  std::vector<uint8_t> mask;  // mask; empty if it did not decode
  Status status;              // malformed: message = the wire name, hint = what was wrong
};

// One line without its newline. Never fails otherwise than by Verb::malformed.
Command parse_line(std::string_view line, uint32_t vocab, const Sampling& defaults);

// ids separated by commas or white space, as in a --tokens-in file. Errors: bad_request, empty_suffix.
Result<std::vector<int32_t>> parse_id_file(std::string_view text, uint32_t vocab);

bool decode_base64(std::string_view text, std::vector<uint8_t>* out);

// The word of <<ERR word>> for a failed request.
std::string wire_error(const Status& status);

// The words of a reply. Each appends one whole word and the white space after it.
void append_begin(std::string* out, uint32_t prompt_tokens, uint32_t cached_tokens);
void append_progress(std::string* out, uint32_t done, uint32_t total);
void append_token(std::string* out, const TokenEvent& token, const Request& request);
void append_logprobs(std::string* out, const TokenEvent& token);
void append_buckets(std::string* out, const Buckets& buckets);  // milliseconds, name_ms=
void append_outcome(std::string* out, const Outcome& outcome);  // counters and fin=, without the sentinel

// Cuts a byte stream into lines. Memory is bounded: of a longer line than `max` only the fact is kept.
class LineSplitter {
 public:
  explicit LineSplitter(size_t max) : max_(max) {}
  // Calls line(text, too_long) for each complete line; a CR before the newline is dropped.
  template <class F>
  void feed(std::string_view data, F&& line) {
    for (size_t newline; (newline = data.find('\n')) != data.npos; data.remove_prefix(newline + 1)) {
      keep(data.substr(0, newline));
      emit(line);
    }
    keep(data);
  }
  // The last line, if the stream ended without a newline.
  template <class F>
  void finish(F&& line) {
    if ((!held_.empty() && held_ != "\r") || too_long_) emit(line);
  }

 private:
  void keep(std::string_view part);
  template <class F>
  void emit(F&& line) {
    if (!held_.empty() && held_.back() == '\r') held_.pop_back();
    line(std::string_view(held_), too_long_);
    held_.clear();
    if (held_.capacity() > kKeptCapacity) held_.shrink_to_fit();
    too_long_ = false;
  }

  static constexpr size_t kKeptCapacity = 64 << 10;
  const size_t max_;
  std::string held_;
  bool too_long_ = false;
};

}  // namespace smoe
