#include "check.h"
#include "util/json.h"

using smoe::Json;
using smoe::json_quote;

namespace {

bool refuses(const std::string& text) { return !Json::parse(text).is_ok(); }

std::string repeat(const std::string& text, int n) {
  std::string out;
  for (int i = 0; i < n; ++i) out += text;
  return out;
}

}  // namespace

TEST(json_values) {
  const auto json = Json::parse(R"( {"a": [1, -2.5e3, true, false, null, "x"], "b": {}, "c": [] } )");
  REQUIRE(json.is_ok());
  const Json* a = json.value().find("a");
  REQUIRE(a && a->is_array() && a->items().size() == 6);
  double number = 0;
  CHECK(a->items()[1].to_double(&number) && number == -2500);
  CHECK(a->items()[2].boolean() && !a->items()[3].boolean());
  CHECK(a->items()[4].type() == Json::Type::null);
  CHECK_EQ(a->items()[5].string(), "x");
  CHECK(json.value().find("b")->is_object() && json.value().find("c")->items().empty());
  CHECK(json.value().find("d") == nullptr && a->find("d") == nullptr);
}

TEST(json_integers_are_exact) {
  const auto json =
      Json::parse("[18446744073709551615, 18446744073709551616, -9223372036854775808, 1.0, 1e2, -1, -0, 1e400]");
  REQUIRE(json.is_ok());
  const auto& n = json.value().items();
  uint64_t u = 0;
  int64_t i = 0;
  double d = 0;
  CHECK(n[0].to_u64(&u) && u == UINT64_MAX);
  CHECK(!n[1].to_u64(&u) && n[1].to_double(&d));
  CHECK(n[2].to_i64(&i) && i == INT64_MIN);
  CHECK(!n[3].to_u64(&u) && !n[4].to_u64(&u) && !n[5].to_u64(&u));
  CHECK(n[6].to_i64(&i) && i == 0);
  CHECK(!n[7].to_double(&d));
}

TEST(json_strings) {
  const auto json = Json::parse(R"(["\"\\\/\b\f\n\r\t", "\u0041\u00e9\u20ac\ud83d\ude00", "é€😀", "\u0000"])");
  REQUIRE(json.is_ok());
  CHECK_EQ(json.value().items()[0].string(), "\"\\/\b\f\n\r\t");
  CHECK_EQ(json.value().items()[1].string(), "A\u00e9\u20ac\U0001F600");
  CHECK_EQ(json.value().items()[2].string(), "\u00e9\u20ac\U0001F600");
  CHECK_EQ(json.value().items()[3].string(), std::string(1, '\0'));
}

TEST(json_refuses) {
  for (const char* text : {"",
                           " ",
                           "{",
                           "[",
                           "\"",
                           "[1",
                           "[1,",
                           "[1,]",
                           "{\"a\"}",
                           "{\"a\":}",
                           "{\"a\":1,}",
                           "{a:1}",
                           "[1 2]",
                           "1 2",
                           "tru",
                           "nul",
                           "True",
                           "NaN",
                           "Infinity",
                           "-",
                           "01",
                           "-01",
                           "1.",
                           ".5",
                           "1e",
                           "1e+",
                           "+1",
                           "0x1",
                           "'a'",
                           "\"\\x\"",
                           "\"\\u12\"",
                           "\"\\u123g\"",
                           "\"\\ud800\"",
                           "\"\\ud800x\"",
                           "\"\\ud800\\u0041\"",
                           "\"\\udc00\"",
                           "\"\n\"",
                           "\"\x01\"",
                           "[1]]",
                           "{\"a\":1,\"a\":2}",
                           "{\"a\":1,\"\\u0061\":2}",
                           "/**/1",
                           "\xEF\xBB\xBF[]"}) {
    if (!refuses(text)) check::fail(__FILE__, __LINE__, std::string("accepted ") + text);
  }
}

TEST(json_refuses_malformed_utf8) {
  for (const char* bytes : {"\x80", "\xC0\x80", "\xC1\xBF", "\xC3", "\xE0\x80\x80", "\xE2\x82", "\xED\xA0\x80",
                            "\xF0\x80\x80\x80", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF", "\xC3\x28"}) {
    CHECK(refuses(std::string("\"") + bytes + "\""));
  }
}

TEST(json_bounds) {
  CHECK(!refuses(repeat("[", 60) + repeat("]", 60)));
  CHECK(refuses(repeat("[", 70) + repeat("]", 70)));
  CHECK(refuses(repeat("[", 1000000)));
  CHECK(refuses(repeat("{\"a\":", 1000000)));
  CHECK(refuses(std::string("[").append(repeat("0,", 5 << 20)).append("0]")));
}

TEST(json_quote_comes_back) {
  std::string all;
  for (int c = 0; c < 128; ++c) all.push_back(static_cast<char>(c));
  all += "\u00e9\U0001F600";
  const auto json = Json::parse(json_quote(all));
  REQUIRE(json.is_ok());
  CHECK(json.value().string() == all);
}
