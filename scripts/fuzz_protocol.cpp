// Fuzzes the wire protocol and the sampler, in one process and without a model.
//
//   fuzz_protocol [--seed N] [--runs N] [--seconds N]      see fuzz.h
//
// A seed is always the same input; one that fails is printed. A case is a few protocol
// lines, mutated, sent in random pieces to the serve loop over a fake engine; or random bytes for the other parsers; or
// a sampler with random logits and parameters. Checked besides crashes (build with -DSMOE_SANITIZE=address,undefined):
// every request has exactly one reply, in the grammar of protocol.h; every draw is a token that was allowed.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <sstream>
#include <thread>
#include <utility>

#include "../tests/engine/fake_engine.h"
#include "../tests/engine/memory_wire.h"
#include "core/options.h"
#include "core/sampler.h"
#include "fuzz.h"
#include "protocol.h"
#include "util/numbers.h"

namespace smoe {
namespace {

class Random {
 public:
  Random(uint64_t seed, uint64_t number) : seed_(seed ^ (number * 0x9e3779b97f4a7c15ull)) {}
  double unit() { return uniform(seed_, count_++); }
  size_t below(size_t n) { return static_cast<size_t>(unit() * static_cast<double>(n)); }
  bool one_in(size_t n) { return below(n) == 0; }
  template <class T, size_t N>
  const T& pick(const T (&items)[N]) {
    return items[below(N)];
  }

 private:
  uint64_t seed_, count_ = 0;
};

const char* const kLines[] = {
    "GEN 5 1,2,3",
    "GEN 3 t=0.7 p=0.9 k=40 r=1.1 min_p=0.05 freq=0.5 pres=-0.5 seed=42 1,2,3,4,5,6",
    "GEN 200 stop=7,8 bias=1:-2.5,3:1e2 session=abc lp=3 slide=0 10,20,30",
    "GEN 4 mask=1 1,2",
    "MASK /////////////////w==",
    "MASK AAAAAAAAAAAAAAAAAA==",
    "MASK AAECAwQFBgcICQoLDA==",
    "SCORE 1,2,3,4",
    "SCORE session=x 5",
    "RESET",
    "INFO",
    "CANCEL",
    "GEN 1 90",
    "GEN 7 tag=a session=s 5,6,7",
    "GEN 9 tag=b session=t lp=2 8",
    "GEN 2 tag=c session=u mask=1 3",
    "MASK tag=c /////////////////w==",
    "CANCEL tag=a",
    "SCORE tag=d 1,2",
    "GEN 1 93,1",
    "GEN 9 94,95",
    "GEN 1 lp=1024 1",
};
const char* const kWords[] = {
    "0",        "-1",     "1",     "99",      "100",    "4294967295", "4294967296", "18446744073709551616",
    "nan",      "inf",    "-inf",  "1e39",    "1e-46",  "1e999",      "0x10",       "",
    ",",        "=",      "t=",    "lp=",     "k=",     "mask=1",     "<<DONE>>",   "GEN",
    "MASK",     "CANCEL", "SCORE", "bias=1:", "stop=,", "\t",         "\r",         "session=../x",
    "\xff\xfe", "é",      ":",     "1,2"};

std::string mutate_line(std::string line, Random& r) {
  for (size_t n = r.below(4); n > 0; --n) {
    const size_t at = r.below(line.size() + 1);
    switch (r.below(7)) {
      case 0:
        line.insert(at, r.pick(kWords));
        break;
      case 1:
        line.insert(at, 1, static_cast<char>(r.below(256)));
        break;
      case 2:
        line.erase(at, 1 + r.below(4));
        break;
      case 3:
        if (at < line.size()) line[at] = static_cast<char>(line[at] ^ (1 << r.below(8)));
        break;
      case 4:
        line.insert(at, std::string(" ") + r.pick(kWords) + " ");
        break;
      case 5:
        line.insert(at, line.substr(r.below(line.size() + 1), r.below(40)));
        break;
      default:
        line = line.substr(0, at) + (r.pick(kLines) + r.below(4));
        break;
    }
  }
  if (r.one_in(500)) line.insert(r.below(line.size() + 1), r.below(1 << 16), static_cast<char>('0' + r.below(12)));
  return line;
}

std::string make_input(Random& r) {
  std::string input;
  for (size_t n = 1 + r.below(8); n > 0; --n) input += mutate_line(r.pick(kLines), r) + (r.one_in(10) ? "\r\n" : "\n");
  if (r.one_in(8)) input.resize(r.below(input.size() + 1));
  return input;
}

// --- what must hold of every reply
// -------------------------------------------------------------------------------------------

size_t expected_replies(const std::string& input) {
  size_t replies = 0;
  for (size_t at = 0; at < input.size();) {
    const size_t end = std::min(input.find('\n', at), input.size());
    std::string line = input.substr(at, end - at), first;
    for (char& c : line) c = c == '\0' || c == '\v' || c == '\f' ? '?' : c;  // not white space of the protocol
    std::istringstream words(line);
    words >> first;
    const Command command = parse_line(line, FakeEngine::kVocab, {});
    // The last line counts without its newline too, unless nothing of it is left.
    const bool counts = end < input.size() || !(line.empty() || line == "\r");
    const bool silent = first == "MASK" ? command.status.is_ok() : first == "CANCEL" && command.verb == Verb::cancel;
    if (counts && !silent) ++replies;
    at = end + 1;
  }
  return replies;
}

bool is_field(const std::string& word) {
  const size_t equals = word.find('=');
  return equals != word.npos && equals > 0 && equals + 1 < word.size();
}

bool is_number(const std::string& word) {
  int32_t id = 0;
  return parse_number(std::string_view(word), &id) && id >= 0 && id < static_cast<int32_t>(FakeEngine::kVocab);
}

// Every reply on a line of its own, whichever way the words of several were mixed. A tag names one request at a time,
// so that a sentinel ends its line.
std::string sorted_out(const std::string& output) {
  std::map<std::string, std::string> begun;
  std::string whole;
  for (size_t at = 0; at < output.size();) {
    const size_t end = std::min(output.find('\n', at), output.size() - 1) + 1;
    std::string line = output.substr(at, end - at);
    at = end;
    if (line[0] != '@') {
      whole += line;
      continue;
    }
    std::string& reply = begun[line.substr(0, line.find(' '))];
    reply += line.substr(line.find(' ') + 1);
    if (!line.ends_with(">>\n")) {
      reply.back() = ' ';
      continue;
    }
    whole += std::exchange(reply, "");
  }
  for (const auto& [tag, reply] : begun) whole += reply;
  return whole;
}

// "" or what is wrong with the output.
std::string check_output(const std::string& output, size_t replies) {
  std::istringstream lines(output);
  size_t seen = 0;
  for (std::string line; std::getline(lines, line); ++seen) {
    if (line == FakeEngine().info_json()) continue;
    std::istringstream words(line);
    std::vector<std::string> all;
    for (std::string word; words >> word;) all.push_back(word);
    if (all.empty()) return "an empty line";
    const bool error = all.size() > 1 && all[all.size() - 2] == "<<ERR" && all.back().ends_with(">>");
    if (!error && all.back() != "<<DONE>>") return "no sentinel: " + line;
    all.resize(all.size() - (error ? 2 : 1));
    for (const std::string& word : all) {
      if (!is_field(word) && !is_number(word)) return "the word " + word;
    }
  }
  if (!output.empty() && output.back() != '\n') return "no newline at the end";
  if (seen != replies) return std::to_string(seen) + " replies to " + std::to_string(replies) + " requests";
  return "";
}

std::string fuzz_serve(const std::string& input, Random& r) {
  FakeEngine engine;
  MemoryWire wire;
  if (r.one_in(2)) wire.set_piece(1 + r.below(20));
  wire.send(input);
  const bool breaks = r.one_in(50);
  if (breaks) wire.break_output();
  // A closed output ends the loop even if the input stays open, once there is something to write.
  const bool writes = expected_replies(input.substr(0, input.rfind('\n') + 1)) > 0;
  if (!breaks || !writes || r.one_in(2)) wire.end();
  const Status status = serve(engine, wire, {}, [](const std::string&) {});
  if (breaks) return "";
  return status.is_ok() ? check_output(sorted_out(wire.output()), expected_replies(input))
                        : "serve ended with " + status.message();
}

// --- the other parsers, the sampler
// ------------------------------------------------------------------------------------------

std::string fuzz_parsers(const std::string& input, Random& r) {
  (void)parse_id_file(input, 100);
  std::vector<uint8_t> bytes;
  decode_base64(input, &bytes);
  uint64_t size = 0;
  if (parse_size(input, &size) && size == 0) return "a size of nothing";
  const char* const flags[] = {"--ctx", "--budget", "--exempt", "--temperature", "--kv",
                               "--io",  "--seed",   "--serve",  "--bogus"};
  std::vector<std::string> words = {"--vault",     "v",           r.pick(flags), input.substr(0, r.below(20)),
                                    r.pick(flags), r.pick(kWords)};
  const auto launch = parse_launch({words.begin(), words.end()});
  if (!launch.is_ok() && launch.status().code() != Code::usage) return "a flag error of the wrong kind";
  return "";
}

float any_float(Random& r) {
  const float special[] = {0,
                           -0.0f,
                           1,
                           1e-4f,
                           0.5f,
                           3.4e38f,
                           -3.4e38f,
                           1e-45f,
                           std::numeric_limits<float>::infinity(),
                           -1.f,
                           2,
                           1e30f,
                           1e-30f,
                           std::numeric_limits<float>::quiet_NaN()};
  if (r.one_in(2)) return r.pick(special);
  const auto bits = static_cast<uint32_t>(r.unit() * 0x1p32);
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return r.one_in(2) ? f : static_cast<float>(r.unit() * 4 - 1);
}

Request any_request(Random& r, uint32_t vocab) {
  Request q;
  Sampling& s = q.sampling;
  for (float* f :
       {&s.temperature, &s.top_p, &s.min_p, &s.repetition_penalty, &s.frequency_penalty, &s.presence_penalty}) {
    if (r.one_in(3)) *f = any_float(r);
  }
  if (r.one_in(2)) s.top_k = r.one_in(4) ? ~0u : static_cast<uint32_t>(r.below(2 * vocab + 2));
  for (size_t n = r.below(4); n > 0; --n)
    q.bias.emplace_back(static_cast<int32_t>(r.below(vocab + (r.one_in(30) ? 2 : 0))), any_float(r));
  q.report_logprobs = r.one_in(3);
  q.logprobs = static_cast<uint32_t>(r.below(2 * vocab));
  return q;
}

std::string fuzz_sampler(Random& r) {
  const auto vocab = static_cast<uint32_t>(1 + r.below(r.one_in(20) ? 5000 : 40));
  Sampler sampler(vocab);
  const Request request = any_request(r, vocab);
  std::vector<int32_t> history(r.below(400)), exempt(r.below(5));
  for (int32_t& id : history) id = static_cast<int32_t>(r.below(vocab));
  for (int32_t& id : exempt) id = static_cast<int32_t>(r.below(2 * vocab));
  if (!sampler.begin(request, exempt).is_ok()) return "";
  const bool wild = r.one_in(2), masked = r.one_in(2);
  std::vector<float> logits(vocab);
  std::vector<uint8_t> mask((vocab + 7) / 8);
  std::vector<double> p(vocab);
  for (int step = 0; step < 4; ++step) {
    for (float& x : logits) x = wild && r.one_in(3) ? any_float(r) : static_cast<float>(r.unit() * 20 - 10);
    for (uint8_t& bits : mask) bits = static_cast<uint8_t>(r.below(256));
    const uint8_t* m = masked ? mask.data() : nullptr;
    TokenEvent event;
    std::vector<float> work = logits;  // a sampler adjusts what it is given
    const Status drawn = sampler.probabilities(work.data(), history, m, p.data());
    double sum = 0;
    for (double x : p) sum += x;
    work = logits;
    const Status status = sampler.sample(work.data(), history, history.size(), m, &event);
    if (drawn.is_ok() != status.is_ok()) return "sample and probabilities disagree";
    if (!status.is_ok()) continue;
    if (event.id < 0 || static_cast<uint32_t>(event.id) >= vocab) return "an id outside the vocabulary";
    if (!std::isfinite(logits[event.id])) return "a token whose logit is not finite";
    if (m && !(m[event.id / 8] >> (event.id % 8) & 1)) return "a token that the mask forbids";
    if (!(std::fabs(sum - 1) < 1e-6)) return "probabilities sum to " + std::to_string(sum);
    if (!(p[event.id] > 0)) return "a token of probability 0";
    if (request.report_logprobs && !(event.logprob <= 1e-3f)) return "a log-probability above 0";
    if (event.top.size() > vocab) return "too many alternatives";
    history.push_back(event.id);
  }
  return "";
}

bool run_case(uint64_t seed, uint64_t number, bool print) {
  Random r(seed, number);
  const std::string input = make_input(r);
  if (print) std::printf("%s\n", input.c_str());
  std::string wrong = fuzz_serve(input, r);
  if (wrong.empty()) wrong = fuzz_parsers(input, r);
  if (wrong.empty()) wrong = fuzz_sampler(r);
  if (wrong.empty()) return true;
  std::printf("fuzz_protocol 0 %llu %llu: %s\n%s\n", static_cast<unsigned long long>(seed),
              static_cast<unsigned long long>(number), wrong.c_str(), input.c_str());
  std::fflush(stdout);  // the process ends without
  return false;
}

}  // namespace
}  // namespace smoe

int main(int argc, char** argv) {
  return fuzz::run(argc, argv, "fuzz_protocol", [](const std::string&, fuzz::Progress*) {
    return [](uint64_t seed) {
      if (smoe::run_case(seed, 0, false)) return;
      smoe::run_case(seed, 0, true);  // prints the input
      ::_exit(1);
    };
  });
}
