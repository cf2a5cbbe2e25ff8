#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <thread>

#include "check.h"
#include "fake_engine.h"
#include "memory_wire.h"
#include "protocol.h"

namespace smoe {
namespace {

constexpr const char* kZeros = "prefill_ms=0.000 decode_ms=0.000 hits=0 misses=0 bytes=0 wait_ms=0.000 ";

// A served fake engine; the destructor ends the input and waits.
struct Served {
  FakeEngine engine;
  MemoryWire wire;
  std::vector<std::string> log;
  Status status;
  std::thread thread;
  bool gated;

  explicit Served(bool gate = false, ServeOptions options = {}) : gated(gate) {
    if (gate) engine.close_gate();
    thread = std::thread([this, options] {
      status = serve(engine, wire, options, [this](const std::string& line) { log.push_back(line); });
    });
  }
  ~Served() {
    if (thread.joinable()) end();
  }
  std::string end() {
    if (gated) engine.permit(1 << 20);
    wire.end();
    thread.join();
    return wire.output();
  }
};

std::string reply_to(std::string_view input, size_t piece = ~size_t{0}) {
  Served s;
  s.wire.set_piece(piece);
  s.wire.send(input);
  const std::string out = s.end();
  CHECK(s.status.is_ok());
  return out;
}

std::string generated(const std::string& words, int count, const char* finish) {
  return words + "gen=" + std::to_string(count) + " " + kZeros + "fin=" + finish + " <<DONE>>\n";
}

size_t count(const std::string& text, std::string_view what) {
  size_t n = 0;
  for (size_t at = 0; (at = text.find(what, at)) != text.npos; at += what.size()) ++n;
  return n;
}

// --- the grammar
// -----------------------------------------------------------------------------------------------------------

TEST(protocol_nothing_before_the_first_request) {
  CHECK_EQ(reply_to(""), "");
  CHECK_EQ(reply_to("CANCEL\nCANCEL\n"), "");
}

TEST(protocol_a_reply_word_by_word) {
  CHECK_EQ(reply_to("GEN 3 1,2,3,4,5\n"), generated("prompt=5 cached=0 pre=4/5 pre=5/5 6 7 8 ", 3, "length"));
  CHECK_EQ(reply_to("GEN 9 97\n"), generated("prompt=1 cached=0 pre=1/1 98 ", 1, "stop"));  // 99 is EOS: not printed
}

// What a client that knows only numbers, sentinels and the two verbs sees: it skips words with `=`.
TEST(protocol_old_client) {
  const std::string out = reply_to("GEN 2 1,2,3\nGEN 2 1,2,3,4,5,6\nRESET\nGEN 1 t=0 p=0.9 k=20 r=1.2 7\n");
  std::istringstream words(out);
  std::string seen;
  for (std::string word; words >> word;) {
    if (word.find('=') == word.npos) seen += word + " ";
  }
  CHECK_EQ(seen, "4 5 <<DONE>> 7 8 <<DONE>> <<DONE>> 8 <<DONE>> ");
  CHECK(out.find("prompt=6 cached=5") != out.npos);
}

TEST(protocol_the_same_however_the_input_is_cut) {
  const std::string input = "GEN 2 1,2,3\r\n\nINFO\nGEN 3 lp=1 mask=0 5\nSCORE 1,2,3\nbad\nRESET";
  const auto strip = [](std::string s) {  // SCORE measures a time
    const size_t at = s.find("gen=0 prefill_ms=");
    return s.erase(at, s.find(' ', at + 6) - at);
  };
  const std::string whole = strip(reply_to(input));
  CHECK(whole.find("<<DONE>>\n", whole.size() - 9) != whole.npos);  // RESET without a newline counts
  for (size_t piece : {1, 2, 3, 7, 16}) CHECK_EQ(strip(reply_to(input, piece)), whole);
}

TEST(protocol_request_keys) {
  Served s;
  s.wire.send(
      "GEN 7 t=0.25 p=0.5 k=5000 r=1.5 min_p=0.1 freq=-0.5 pres=2 seed=18446744073709551615 stop=4,5 bias=1:-3.5,2:1e1 "
      "session=a.B_-1 lp=3 slide=0 buckets=1 later=x =9 1,2\n");
  CHECK(s.wire.wait_for("<<DONE>>"));
  const Request r = s.engine.last_request();
  CHECK_EQ(r.max_tokens, 7u);
  CHECK_EQ(r.sampling.temperature, 0.25f);
  CHECK_EQ(r.sampling.top_p, 0.5f);
  CHECK_EQ(r.sampling.top_k, 1024u);
  CHECK_EQ(r.sampling.repetition_penalty, 1.5f);
  CHECK_EQ(r.sampling.min_p, 0.1f);
  CHECK_EQ(r.sampling.frequency_penalty, -0.5f);
  CHECK_EQ(r.sampling.presence_penalty, 2.0f);
  CHECK_EQ(r.sampling.seed, ~uint64_t{0});
  CHECK(r.stop_ids == std::vector<int32_t>({4, 5}));
  CHECK((r.bias == std::vector<std::pair<int32_t, float>>{{1, -3.5f}, {2, 10.0f}}));
  CHECK_EQ(r.session, "a.B_-1");
  CHECK(r.report_logprobs && r.logprobs == 3 && !r.slide && !r.mask && r.report_buckets);
  CHECK(r.ids == std::vector<int32_t>({1, 2}));
}

TEST(protocol_overrides_last_for_one_request) {
  ServeOptions options;
  options.defaults.temperature = 0.125f;
  options.defaults.seed = 5;
  Served s(false, options);
  s.wire.send("GEN 1 t=0 seed=-1 1\n");
  CHECK(s.wire.wait_for("<<DONE>>"));
  CHECK_EQ(s.engine.last_request().sampling.temperature, 0.0f);
  CHECK_EQ(s.engine.last_request().sampling.seed, ~uint64_t{0});
  s.wire.send("GEN 1 50\n");
  CHECK(s.wire.wait_for("51 "));
  s.end();
  CHECK_EQ(s.engine.last_request().sampling.temperature, 0.125f);
  CHECK_EQ(s.engine.last_request().sampling.seed, 5u);
}

TEST(protocol_malformed_is_bad_request_and_changes_nothing) {
  const std::string long_name(65, 'a');
  for (const std::string& line : {std::string(""),
                                  std::string("   "),
                                  std::string("gen 1 1"),
                                  std::string("GENERATE 1 1"),
                                  std::string("GEN"),
                                  std::string("GEN 1,2"),
                                  std::string("GEN 0 1"),
                                  std::string("GEN -1 1"),
                                  std::string("GEN 1.5 1"),
                                  std::string("GEN 4294967296 1"),
                                  std::string("GEN 99999999999999999999999 1"),
                                  std::string("GEN t=0 1"),
                                  std::string("GEN 1 100"),
                                  std::string("GEN 1 -1"),
                                  std::string("GEN 1 1,"),
                                  std::string("GEN 1 ,1"),
                                  std::string("GEN 1 1,,2"),
                                  std::string("GEN 1 1;2"),
                                  std::string("GEN 1 1, 2"),
                                  std::string("GEN 1 1 2"),
                                  std::string("GEN 1 1 t=0"),
                                  std::string("GEN 1 0x1"),
                                  std::string("GEN 1 +1"),
                                  std::string("GEN 1 2147483648"),
                                  std::string("GEN 1 99999999999999999999"),
                                  std::string("GEN 1 1e1"),
                                  std::string("GEN 1 t= 1"),
                                  std::string("GEN 1 t=nan 1"),
                                  std::string("GEN 1 t=NaN 1"),
                                  std::string("GEN 1 t=inf 1"),
                                  std::string("GEN 1 t=-inf 1"),
                                  std::string("GEN 1 t=Infinity 1"),
                                  std::string("GEN 1 t=-1 1"),
                                  std::string("GEN 1 t=1e39 1"),
                                  std::string("GEN 1 t=1e999 1"),
                                  std::string("GEN 1 t=abc 1"),
                                  std::string("GEN 1 t=1x 1"),
                                  std::string("GEN 1 t=0x1p3 1"),
                                  std::string("GEN 1 p=1.01 1"),
                                  std::string("GEN 1 p=-0.1 1"),
                                  std::string("GEN 1 p=nan 1"),
                                  std::string("GEN 1 k=-1 1"),
                                  std::string("GEN 1 k=1.5 1"),
                                  std::string("GEN 1 k=nan 1"),
                                  std::string("GEN 1 k=99999999999 1"),
                                  std::string("GEN 1 r=0 1"),
                                  std::string("GEN 1 r=-1 1"),
                                  std::string("GEN 1 r=nan 1"),
                                  std::string("GEN 1 min_p=2 1"),
                                  std::string("GEN 1 freq=nan 1"),
                                  std::string("GEN 1 pres=inf 1"),
                                  std::string("GEN 1 seed= 1"),
                                  std::string("GEN 1 seed=1.0 1"),
                                  std::string("GEN 1 seed=18446744073709551616 1"),
                                  std::string("GEN 1 stop= 1"),
                                  std::string("GEN 1 stop=100 1"),
                                  std::string("GEN 1 stop=1,,2 1"),
                                  std::string("GEN 1 bias= 1"),
                                  std::string("GEN 1 bias=1 1"),
                                  std::string("GEN 1 bias=1:nan 1"),
                                  std::string("GEN 1 bias=100:1 1"),
                                  std::string("GEN 1 bias=:1 1"),
                                  std::string("GEN 1 bias=1:1, 1"),
                                  std::string("GEN 1 session=a/b 1"),
                                  "GEN 1 session=" + long_name + " 1",
                                  std::string("GEN 1 lp=-1 1"),
                                  std::string("GEN 1 lp=1025 1"),
                                  std::string("GEN 1 mask=2 1"),
                                  std::string("GEN 1 slide=yes 1"),
                                  std::string("SCORE 100"),
                                  std::string("SCORE t=nan 1"),
                                  std::string("RESET now"),
                                  std::string("INFO 1"),
                                  std::string("CANCEL 1"),
                                  std::string("SAVE x"),
                                  std::string("LOAD x"),
                                  std::string("GEN 1 1\0", 8),
                                  std::string("\0\1\2\xff\xfe", 5),
                                  std::string("GEN\xc2\xa0 1 1")}) {
    const std::string out = reply_to(line + "\nGEN 1 1\n");
    const std::string want = "<<ERR bad_request>>\n" + generated("prompt=1 cached=0 pre=1/1 2 ", 1, "length");
    if (out != want) check::fail(__FILE__, __LINE__, "'" + line + "' -> " + out);
  }
}

TEST(protocol_empty_suffix_is_an_empty_id_list_only) {
  for (const char* line : {"GEN 5\n", "GEN 5 \n", "GEN 5 t=0 k=3\n", "SCORE\n", "SCORE x=1\n"}) {
    CHECK_EQ(reply_to(line), "<<ERR empty_suffix>>\n");
  }
}

TEST(protocol_a_long_line_is_refused_in_bounded_memory) {
  const size_t max = max_line_bytes(FakeEngine::kCtx);
  std::string input = "GEN 1 1";
  while (input.size() <= max) input += ",1";
  CHECK_EQ(reply_to(input + "\nINFO\n"), "<<ERR bad_request>>\n{\"model\": \"fake\", \"ctx\": 1000}\n");
  CHECK_EQ(reply_to(std::string(3 * max, 'x'), 65536), "<<ERR bad_request>>\n");
  // One that just fits is taken.
  input = "GEN 1 1";
  while (input.size() + 2 <= max) input += ",1";
  CHECK_EQ(count(reply_to(input + "\n"), "fin=length <<DONE>>"), 1u);
}

TEST(protocol_logprob_words) {
  CHECK_EQ(reply_to("GEN 2 lp=0 5\n"), generated("prompt=1 cached=0 pre=1/1 6 lp=-0.5 7 lp=-0.5 ", 2, "length"));
  CHECK_EQ(reply_to("GEN 1 lp=2 5\n"), generated("prompt=1 cached=0 pre=1/1 6 lp=-0.5 top=0:-1,1:-2 ", 1, "length"));
}

TEST(protocol_score) {
  const std::string out = reply_to("SCORE 1,2,3\nSCORE 4\n");
  CHECK_EQ(out.find("pre=3/3 lp=-0.25 lp=-0.25 gen=0 prefill_ms="), 0u);
  CHECK_EQ(count(out, " <<DONE>>\n"), 2u);
  CHECK_EQ(count(out, "lp="), 2u);
  CHECK_EQ(count(out, "fin="), 0u);
  const std::string tops = reply_to("SCORE lp=2 1,2\nSCORE lp=0 1,2\n");
  CHECK_EQ(tops.find("pre=2/2 lp=-0.25 top=0:-1,1:-2 gen=0 "), 0u);
  CHECK_EQ(count(tops, "top="), 1u);
}

TEST(protocol_failures_have_their_names) {
  CHECK_EQ(reply_to("GEN 1 90\n"), "prompt=1 cached=0 pre=1/1 <<ERR io_error>>\n");
  CHECK_EQ(reply_to("GEN 1 91\n"), "prompt=1 cached=0 pre=1/1 <<ERR non_finite>>\n");
  CHECK_EQ(reply_to("GEN 1 92\n"), "prompt=1 cached=0 pre=1/1 <<ERR no_memory>>\n");
  CHECK_EQ(reply_to("GEN 1 93\n"), "prompt=1 cached=0 pre=1/1 <<ERR no_memory>>\n");
  CHECK_EQ(reply_to("GEN 1 95\n"), "prompt=1 cached=0 pre=1/1 <<ERR failed>>\n");
  CHECK_EQ(reply_to("SCORE 90,1\n"), "pre=2/2 <<ERR io_error>>\n");
  std::string ids = "1";
  for (uint32_t i = 0; i < FakeEngine::kCtx; ++i) ids += ",1";
  CHECK_EQ(reply_to("GEN 1 slide=0 " + ids + "\n"), "prompt=1001 ctx=1000 <<ERR ctx_overflow>>\n");
  CHECK_EQ(wire_error({Code::corrupt, "record 3 of layer 1: checksum"}), "io_error");
  CHECK_EQ(wire_error({Code::usage, "nonsense"}), "bad_request");
}

TEST(protocol_reasons_and_warnings_go_to_the_log) {
  Served s;
  s.wire.send(
      "GEN 1 t=\xff\n"
      "GEN 1 94\nGEN 1 90\n");
  s.end();
  REQUIRE(s.log.size() == 3);
  CHECK_EQ(s.log[0], "request refused: bad_request: the field 't=?'");
  CHECK_EQ(s.log[1], "warning: odd logits");
  CHECK_EQ(s.log[2], "request refused: io_error: io_error: read of layer 3, expert 7 failed");
}

TEST(protocol_instrument_logs_one_line_a_request) {
  Served s(false, {{}, true});
  s.wire.send("GEN 1 1\nRESET\n");
  s.end();
  REQUIRE(s.log.size() == 1);
  CHECK_EQ(s.log[0].find("instrument: prompt=1 cached=0 gen=1 prefill_ms=0.000 decode_ms=0.000 attention_ms=0.000"),
           0u);
}

// --- running and waiting
// -----------------------------------------------------------------------------------------------------

TEST(protocol_requests_queue_in_order) {
  Served s(true);
  s.wire.send("GEN 1 10\nGEN 1 20\nINFO\nGEN 1 30\n");
  CHECK(s.wire.wait_read());
  CHECK_EQ(count(s.wire.output(), "<<DONE>>"), 0u);
  const std::string out = s.end();
  CHECK(out.find(" 11 ") < out.find(" 21 ") && out.find(" 21 ") < out.find("fake") &&
        out.find("fake") < out.find(" 31 "));
  CHECK_EQ(count(out, "fin=length <<DONE>>"), 3u);
}

TEST(protocol_cancel_ends_the_running_request_only) {
  Served s(true);
  s.wire.send("GEN 1000 1\nGEN 1 50\n");
  s.engine.permit(3);
  CHECK(s.wire.wait_for(" 4 "));
  s.wire.send("CANCEL\n");
  CHECK(s.wire.wait_read());
  const std::string out = s.end();
  CHECK_EQ(count(out, "gen=3"), 1u);
  CHECK_EQ(count(out, "fin=cancel <<DONE>>"), 1u);
  CHECK_EQ(count(out, " 51 gen=1 "), 1u);
  CHECK_EQ(count(out, "fin=length <<DONE>>"), 1u);
}

TEST(protocol_cancel_read_with_its_request_counts) {
  Served s(true);
  s.wire.send("GEN 1000 1\nCANCEL\n");
  CHECK(s.wire.wait_read());
  const std::string out = s.end();
  CHECK_EQ(count(out, "fin=cancel <<DONE>>"), 1u);
  CHECK_EQ(count(out, "gen=0"), 1u);
}

TEST(protocol_cancel_when_idle_is_forgotten) {
  Served s;
  s.wire.send("CANCEL\nGEN 2 1\n");
  CHECK(s.wire.wait_for("<<DONE>>"));
  s.wire.send("CANCEL\nGEN 2 10\n");
  const std::string out = s.end();
  CHECK_EQ(count(out, "fin=length <<DONE>>"), 2u);
  CHECK_EQ(count(out, "fin=cancel"), 0u);
}

TEST(protocol_cancelled_score) {
  Served s(true);
  s.wire.send("GEN 1 1\nSCORE 1,2\nGEN 1 3\n");
  CHECK(s.wire.wait_read());
  s.wire.send("CANCEL\n");
  CHECK(s.wire.wait_read());
  const std::string out = s.end();
  CHECK_EQ(count(out, "fin=cancel <<DONE>>"), 1u);
  CHECK_EQ(count(out, "<<DONE>>"), 3u);
}

TEST(protocol_a_full_queue_stops_the_reading_not_the_engine) {
  Served s(true);
  std::string input;
  for (size_t i = 0; i < 2 * kMaxQueued; ++i) input += "GEN 1 1\n";
  s.wire.set_piece(64);
  s.wire.send(input);
  CHECK(s.wire.wait_for("prompt=1"));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(!s.wire.all_taken());
  CHECK_EQ(count(s.end(), "fin=length <<DONE>>"), 2 * kMaxQueued);
}

TEST(protocol_a_closed_output_ends_the_loop) {
  Served s;  // its input stays open
  s.wire.send("GEN 1 1\n");
  CHECK(s.wire.wait_for("<<DONE>>"));
  s.wire.break_output();
  s.wire.send("GEN 4000000000 t=0 1\n");
  s.thread.join();
  CHECK(s.status.code() == Code::io);
}

// --- masks
// -------------------------------------------------------------------------------------------------------------------

std::string mask_line(std::initializer_list<int> allowed) {
  static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::vector<uint8_t> bits((FakeEngine::kVocab + 7) / 8 + 2);  // 13 bytes and two of padding: 20 digits
  for (int id : allowed) bits[id / 8] |= 1 << (id % 8);
  std::string text;
  for (size_t i = 0; i < 15; i += 3) {
    const uint32_t v = bits[i] << 16 | bits[i + 1] << 8 | bits[i + 2];
    for (int shift = 18; shift >= 0; shift -= 6) text += digits[v >> shift & 63];
  }
  text.replace(18, 2, "==");
  return "MASK " + text + "\n";
}

TEST(protocol_masks_one_before_each_step) {
  Served s;
  s.wire.send("GEN 3 mask=1 1\n");
  s.wire.send(mask_line({40, 41}));
  CHECK(s.wire.wait_for(" 40 "));
  s.wire.send(mask_line({7}));
  CHECK(s.wire.wait_for(" 7 "));
  s.wire.send(mask_line({98}));
  CHECK(s.wire.wait_for("fin=length <<DONE>>"));
  s.wire.send(mask_line({1}));  // one too many, as a client that works ahead sends: dropped
  s.wire.send("GEN 1 5\n");
  CHECK_EQ(count(s.end(), "<<DONE>>"), 2u);
}

TEST(protocol_mask_that_is_wrong_fails_its_request) {
  for (const char* line : {"MASK AAAA\n", "MASK\n", "MASK !!!!\n", "MASK AAAAAAAAAAAAAAAAAA== x\n"}) {
    Served s;
    s.wire.send("GEN 3 mask=1 1\n" + mask_line({40}) + line + "GEN 1 5\n");
    CHECK(s.wire.wait_for("<<ERR bad_request>>"));
    const std::string out = s.end();
    CHECK_EQ(count(out, "fin=cancel"), 0u);
    CHECK_EQ(count(out, " 6 gen=1 "), 1u);
  }
}

TEST(protocol_mask_nobody_waits_for_is_dropped) {
  Served s(true);
  s.wire.send("GEN 1 1\nMASK !!!!\n" + mask_line({7}));
  CHECK(s.wire.wait_read());
  CHECK_EQ(count(s.end(), " 2 gen=1 "), 1u);
}

TEST(protocol_masks_that_never_come) {
  Served s;
  s.wire.send("GEN 3 mask=1 1\n");
  CHECK(s.wire.wait_for("pre=1/1"));
  s.wire.send("CANCEL\nGEN 3 mask=1 2\n");
  CHECK(s.wire.wait_for("fin=cancel <<DONE>>"));
  CHECK_EQ(count(s.end(), "fin=cancel <<DONE>>"), 2u);  // the end of input ends the second
}

TEST(protocol_masks_ahead_are_bounded) {
  Served s(true);
  s.wire.send("GEN 100 mask=1 1\n");
  for (int i = 0; i < 65; ++i) s.wire.send(mask_line({3}));
  CHECK(s.wire.wait_read());
  CHECK_EQ(count(s.end(), "<<ERR bad_request>>"), 1u);
}

// --- tags
// --------------------------------------------------------------------------------------------------------------------

// What was said to one tag, as if it had been alone.
std::string said_to(const std::string& tag, const std::string& out) {
  std::string words;
  for (size_t at = 0; at < out.size();) {
    const size_t end = std::min(out.find('\n', at), out.size());
    const std::string line = out.substr(at, end - at), mark = "@" + tag + " ";
    if (line.starts_with(mark)) words += line.substr(mark.size()) + " ";
    at = end + 1;
  }
  return words;
}

TEST(protocol_tags_advance_together) {
  Served s(true);
  s.wire.send("GEN 9 tag=a session=x 10\nGEN 3 tag=b session=y 20\n");
  CHECK(s.wire.wait_read());
  s.engine.permit(4);
  CHECK(s.wire.wait_for("@b 21\n"));
  const std::string out = s.end();
  const std::string alone = generated("prompt=1 cached=0 pre=1/1 21 22 23 ", 3, "length");
  CHECK_EQ(said_to("b", out), alone.substr(0, alone.size() - 1) + " ");
  CHECK(out.find("@b 23\n") < out.find("@a 19\n"));
  CHECK_EQ(count(out, "fin=length <<DONE>>\n"), 2u);
}

TEST(protocol_without_a_tag_nothing_runs_beside) {
  Served s(true);
  s.wire.send("GEN 2 tag=a session=x 10\nGEN 2 30\nGEN 2 tag=b session=y 20\nINFO\n");
  const std::string out = s.end();
  CHECK(out.find("@a gen=2") < out.find("prompt=1 cached=0 pre=1/1 31 32 gen=2"));
  CHECK(out.find(" 31 32 gen=2") < out.find("@b prompt"));
  CHECK(out.find("@b gen=2") < out.find("fake"));
}

TEST(protocol_one_of_several_is_cancelled) {
  Served s(true);
  s.wire.send("GEN 100 tag=a session=x 1\nGEN 3 tag=b session=y 20\n");
  CHECK(s.wire.wait_read());
  s.engine.permit(4);
  CHECK(s.wire.wait_for("@b 21\n"));
  s.wire.send("CANCEL\nCANCEL tag=z\nCANCEL tag=a\n");
  CHECK(s.wire.wait_read());
  const std::string out = s.end();
  CHECK_EQ(count(out, "fin=cancel"), 1u);
  CHECK(said_to("a", out).find("fin=cancel <<DONE>>") != out.npos);
  CHECK_EQ(count(said_to("b", out), "21 22 23 gen=3 "), 1u);
}

TEST(protocol_masks_find_their_tag_and_hold_up_nobody) {
  Served s;
  s.wire.send("GEN 2 tag=a session=x mask=1 1\nGEN 3 tag=b session=y 20\n");
  CHECK(s.wire.wait_for("@b gen=3"));
  const auto to_a = [](std::string line) { return line.insert(5, "tag=a "); };
  s.wire.send("MASK tag=b AAAA\n" + to_a(mask_line({40})) + to_a(mask_line({7})));
  CHECK(s.wire.wait_for("@a gen=2"));
  CHECK_EQ(count(said_to("a", s.end()), "40 7 gen=2 "), 1u);
}

TEST(protocol_more_than_fit_wait_and_so_does_a_session_or_tag_in_use) {
  for (const char* last : {"GEN 1 tag=d session=4 40\n", "GEN 1 tag=d session=1 40\n", "GEN 1 tag=a session=4 40\n"}) {
    Served s(true);
    s.wire.send("GEN 5 tag=a session=1 10\nGEN 1 tag=b session=2 20\nGEN 5 tag=c session=3 30\n" + std::string(last));
    CHECK(s.wire.wait_read());
    const std::string out = s.end();
    CHECK_EQ(count(out, "fin=length <<DONE>>"), 4u);
    CHECK(out.find("@b gen=1") < out.find(" 41"));
    if (last[9] == 'a' || last[19] == '1') CHECK(out.find("@a gen=5") < out.find(" 41"));
  }
}

TEST(protocol_what_waits_for_its_session_or_tag_is_passed) {
  for (const char* waits : {"tag=w session=1", "tag=a session=4", "tag=w"}) {
    Served s(true);
    const std::string first = std::string(waits) == "tag=w" ? "GEN 9 tag=a 10\n" : "GEN 9 tag=a session=1 10\n";
    const std::string w(waits);
    s.wire.send(first + "GEN 1 " + w + " 50\nGEN 1 " + w + " 60\nGEN 1 tag=b session=2 20\nGEN 1 tag=c session=2 30\n");
    CHECK(s.wire.wait_read());
    const std::string out = s.end();
    CHECK_EQ(count(out, "fin=length <<DONE>>"), 5u);
    CHECK(out.find("@b gen=1") < out.find("@a gen=9"));
    CHECK(out.find("@b gen=1") < out.find("@c prompt"));  // in its session's order
    CHECK(out.find("@a gen=9") < out.find(" 51"));        // and this one in its own
    CHECK(out.find(" 51\n") < out.find(" 61\n"));
  }
  Served s(true);  // but nothing passes what runs alone
  s.wire.send("GEN 9 tag=a session=1 10\nGEN 1 tag=w session=1 50\nGEN 1 70\nGEN 1 tag=b session=2 20\n");
  CHECK(s.wire.wait_read());
  const std::string out = s.end();
  CHECK(out.find(" 51\n") < out.find(" 71 ") && out.find(" 71 ") < out.find(" 21\n"));
}

TEST(protocol_one_fails_and_the_others_go_on) {
  const std::string out =
      reply_to("GEN 4 tag=a session=x 90\nGEN 4 tag=b session=y 20\nGEN 4 tag=c session=z t=-1 5\nGEN 0 tag=d 1\n");
  CHECK_EQ(said_to("a", out), "prompt=1 cached=0 pre=1/1 <<ERR io_error>> ");
  CHECK_EQ(said_to("c", out), "<<ERR bad_request>> ");
  CHECK_EQ(said_to("d", out), "<<ERR bad_request>> ");
  CHECK_EQ(count(said_to("b", out), "21 22 23 24 gen=4 "), 1u);
}

TEST(protocol_a_tag_that_is_none) {
  for (const char* line :
       {"GEN 1 tag= 1\n", "GEN 1 tag=a/b 1\n", "CANCEL tag=\n", "GEN 1 tag=123456789012345678901234567890123 1\n"})
    CHECK_EQ(reply_to(line), "<<ERR bad_request>>\n");
}

TEST(protocol_base64) {
  std::vector<uint8_t> out;
  CHECK(decode_base64("", &out) && out.empty());
  CHECK(decode_base64("TWFu", &out) && out == std::vector<uint8_t>({'M', 'a', 'n'}));
  CHECK(decode_base64("TWE=", &out) && out == std::vector<uint8_t>({'M', 'a'}));
  CHECK(decode_base64("//+A", &out) && out == std::vector<uint8_t>({0xff, 0xff, 0x80}));
  for (const char* bad : {"T", "TW", "TWF", "T===", "TW=u", "TW u", "====", "TWFu\n"}) CHECK(!decode_base64(bad, &out));
}

// --- descriptors, one request
// ------------------------------------------------------------------------------------------------

TEST(wire_over_pipes) {
  std::signal(SIGPIPE, SIG_IGN);
  int in[2], out[2];
  REQUIRE(::pipe(in) == 0 && ::pipe(out) == 0);
  auto wire = std::move(open_wire(in[0], out[1])).value();
  char data[8];
  REQUIRE(::write(in[1], "abc", 3) == 3);
  CHECK_EQ(wire->read(data, sizeof data), 3u);
  CHECK(wire->write("xyz"));
  CHECK_EQ(::read(out[0], data, sizeof data), 3);

  // Non-blocking and far more than the pipe holds: all of it arrives.
  ::fcntl(out[1], F_SETFL, O_NONBLOCK);
  const std::string big(1 << 20, 'w');
  std::thread writer([&] { CHECK(wire->write(big)); });
  size_t seen = 0;
  for (char buffer[4096]; seen < big.size();) seen += static_cast<size_t>(::read(out[0], buffer, sizeof buffer));
  writer.join();

  std::thread stopper([&] { wire->stop(); });
  CHECK_EQ(wire->read(data, sizeof data), 0u);  // though the other end is open and silent
  stopper.join();
  ::close(out[0]);
  CHECK(!wire->write("gone"));
  for (int fd : {in[0], in[1], out[1]}) ::close(fd);
}

TEST(protocol_run_once) {
  FakeEngine engine;
  MemoryWire wire;
  Request request;
  request.ids = {1, 2};
  request.max_tokens = 2;
  const auto log = [](const std::string&) {};
  CHECK(run_once(engine, wire, request, {}, log).is_ok());
  CHECK_EQ(wire.output(), generated("prompt=2 cached=0 pre=2/2 3 4 ", 2, "length"));
  request.ids = {FakeEngine::kIoError};
  CHECK(run_once(engine, wire, request, {}, log).code() == Code::io);
}

TEST(protocol_id_file) {
  for (const char* text : {"1,2,3", "1 2 3\n", "1, 2, 3", "\n1\n2\n3", "1,2\n3,\n"}) {
    const auto ids = parse_id_file(text, 100);
    CHECK(ids.is_ok() && ids.value() == std::vector<int32_t>({1, 2, 3}));
  }
  CHECK_EQ(std::string(parse_id_file(" \n", 100).status().message()), "empty_suffix");
  for (const char* text : {"1,,2", ",", "1 x", "100", "-1", "1;2"}) CHECK(!parse_id_file(text, 100).is_ok());
}

}  // namespace
}  // namespace smoe
