#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "check.h"
#include "core/sampler.h"

namespace smoe {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

Request plain(float temperature) {
  Request r;
  r.sampling = {temperature, 1.0f, 0, 0.0f, 1.0f, 0.0f, 0.0f, 1337};
  return r;
}

std::vector<double> probabilities(const Request& r, std::vector<float> logits, const std::vector<int32_t>& history = {},
                                  const std::vector<int32_t>& exempt = {}) {
  Sampler sampler(static_cast<uint32_t>(logits.size()));
  std::vector<double> p(logits.size());
  CHECK(sampler.begin(r, exempt).is_ok());
  CHECK(sampler.probabilities(logits.data(), history, nullptr, p.data()).is_ok());
  return p;
}

int32_t pick(Sampler& sampler, std::vector<float> logits, uint64_t position = 0) {
  TokenEvent event;
  event.id = -1;
  CHECK(sampler.sample(logits.data(), {}, position, nullptr, &event).is_ok());
  return event.id;
}

bool near(double a, double b) { return std::fabs(a - b) < 1e-6; }

TEST(sampler_greedy_takes_the_first_of_equals) {
  Sampler sampler(4);
  CHECK(sampler.begin(plain(0), {}).is_ok());
  CHECK_EQ(pick(sampler, {1, 3, 3, 2}), 1);
  CHECK(sampler.begin(plain(0.99e-4f), {}).is_ok());
  CHECK_EQ(pick(sampler, {1, 3, 3, 2}), 1);
}

TEST(sampler_greedy_still_obeys_penalty_bias_and_mask) {
  Request r = plain(0);
  r.sampling.repetition_penalty = 2;
  CHECK(near(probabilities(r, {3, 2, 1}, {0})[1], 1));
  CHECK(near(probabilities(r, {3, 2, 1}, {0}, {0})[0], 1));  // exempt
  CHECK(near(probabilities(r, {-3, -2, -5}, {1})[0], 1));    // negative logits are multiplied
  r.bias = {{2, 10.0f}};
  CHECK(near(probabilities(r, {3, 2, 1})[2], 1));
  Sampler sampler(3);
  CHECK(sampler.begin(r, {}).is_ok());
  const uint8_t mask = 0b011;
  std::vector<float> logits = {1, 2, 9};
  TokenEvent event;
  CHECK(sampler.sample(logits.data(), {}, 0, &mask, &event).is_ok());
  CHECK_EQ(event.id, 1);
}

TEST(sampler_penalty_sees_256_tokens_each_id_once) {
  Request r = plain(1);
  r.sampling.repetition_penalty = 2;
  std::vector<int32_t> history = {0};
  history.insert(history.end(), 256, 1);  // id 0 has just left the window, id 1 fills it
  const auto p = probabilities(r, {2, 2, 2}, history);
  CHECK(near(p[0], p[2]));
  CHECK(near(p[1] / p[0], std::exp(-1.0)));
  history.erase(history.begin() + 1);
  CHECK(near(probabilities(r, {2, 2, 2}, history)[0], p[1] * (2 * p[0] + p[1]) / (p[0] + 2 * p[1])));
}

TEST(sampler_counts_what_was_generated_in_this_request) {
  Request r = plain(0);
  r.sampling.frequency_penalty = 0.4f;
  r.sampling.presence_penalty = 0.3f;
  Sampler sampler(3);
  std::vector<float> logits = {1.0f, 0.5f, 0.25f};
  for (int request = 0; request < 2; ++request) {  // the second has forgotten the first
    CHECK(sampler.begin(r, {}).is_ok());
    CHECK_EQ(pick(sampler, logits), 0);  // then 0 stands at 0.3
    CHECK_EQ(pick(sampler, logits), 1);  // then 1 stands at -0.2
    CHECK_EQ(pick(sampler, logits), 0);  // then 0 stands at -0.1
    CHECK_EQ(pick(sampler, logits), 2);
  }
}

TEST(sampler_filters) {
  std::vector<float> logits = {std::log(0.1f), std::log(0.5f), std::log(0.15f), std::log(0.25f)};
  Request r = plain(1);
  r.sampling.top_k = 2;
  auto p = probabilities(r, logits);
  CHECK(near(p[1], 2.0 / 3) && near(p[3], 1.0 / 3) && p[0] == 0 && p[2] == 0);
  r = plain(1);
  r.sampling.top_p = 0.6f;
  p = probabilities(r, logits);
  CHECK(near(p[1], 2.0 / 3) && near(p[3], 1.0 / 3) && p[0] == 0 && p[2] == 0);
  r.sampling.top_p = 0.499f;
  CHECK(near(probabilities(r, logits)[1], 1));
  r.sampling.top_p = 0.501f;
  CHECK(near(probabilities(r, logits)[3], 1.0 / 3));
  r.sampling.top_p = 0;
  CHECK(near(probabilities(r, logits)[1], 1));
  r = plain(1);
  r.sampling.min_p = 0.29f;
  p = probabilities(r, logits);
  CHECK(near(p[1], 5.0 / 9) && p[0] == 0);
}

TEST(sampler_top_k_is_capped_and_keeps_ties) {
  std::vector<float> logits(3000);
  std::iota(logits.begin(), logits.end(), 0.0f);
  for (float& x : logits) x *= 1e-6f;
  Request r = plain(1);
  r.sampling.top_k = 2000;
  auto p = probabilities(r, logits);
  CHECK_EQ(std::count_if(p.begin(), p.end(), [](double x) { return x > 0; }), 1024);
  r.sampling.top_k = 2;
  p = probabilities(r, {1, 2, 1, 0});
  CHECK_EQ(std::count_if(p.begin(), p.end(), [](double x) { return x > 0; }), 3);
}

// Values are passed over many at a time: nothing is lost where a vocabulary is not a multiple of that.
TEST(sampler_finds_the_best_in_any_vocabulary) {
  for (uint32_t vocab = 1; vocab < 200; ++vocab) {
    std::vector<float> logits(vocab);
    for (uint32_t i = 0; i < vocab; ++i) logits[i] = static_cast<float>(i * 7919 % 53);  // ties, once it is long enough
    if (vocab > 3) logits[vocab / 3] = kNan;
    std::vector<float> clean = logits;
    std::replace_if(clean.begin(), clean.end(), [](float x) { return std::isnan(x); }, -kInf);
    Sampler sampler(vocab);
    CHECK(sampler.begin(plain(0), {}).is_ok());
    CHECK_EQ(pick(sampler, logits), std::max_element(clean.begin(), clean.end()) - clean.begin());
    for (const uint32_t k : {1u, 2u, 5u, 64u}) {
      std::vector<float> sorted = clean;
      std::sort(sorted.begin(), sorted.end(), std::greater<>());
      Request r = plain(1);
      r.sampling.top_k = k;
      const std::vector<double> p = probabilities(r, logits);
      const float edge = k < vocab ? sorted[k - 1] : -kInf;
      for (uint32_t i = 0; i < vocab; ++i) CHECK_EQ(p[i] > 0, clean[i] >= edge && clean[i] != -kInf);
    }
  }
}

TEST(sampler_masks_what_is_not_finite_and_says_so_once) {
  Sampler sampler(4);
  CHECK(sampler.begin(plain(0), {}).is_ok());
  CHECK_EQ(pick(sampler, {0, 1, 2, 3}), 3);
  CHECK(sampler.take_warning() == nullptr);
  CHECK_EQ(pick(sampler, {kNan, 1, 2, kInf}), 2);
  CHECK(sampler.take_warning() != nullptr);
  CHECK_EQ(pick(sampler, {kNan, 1, -kInf, kInf}), 1);
  CHECK(sampler.take_warning() == nullptr);
  CHECK(sampler.begin(plain(1), {}).is_ok());
  for (uint64_t i = 0; i < 50; ++i) CHECK_EQ(pick(sampler, {kNan, kInf, 1, -kInf}, i), 2);
  CHECK(sampler.take_warning() != nullptr);
}

TEST(sampler_refuses_when_nothing_is_left) {
  Sampler sampler(3);
  CHECK(sampler.begin(plain(1), {}).is_ok());
  TokenEvent event;
  std::vector<float> broken = {kNan, kInf, -kInf}, half = {kNan, 1, 1}, good = {1, 1, 1};
  const uint8_t none = 0b000, only_broken = 0b001;
  CHECK_EQ(sampler.sample(broken.data(), {}, 0, nullptr, &event).message(), "non_finite");
  CHECK_EQ(sampler.sample(half.data(), {}, 0, &only_broken, &event).message(), "non_finite");
  CHECK_EQ(sampler.sample(good.data(), {}, 0, &none, &event).message(), "bad_request");
}

TEST(sampler_refuses_numbers_outside_their_range) {
  const auto refused = [](auto change) {
    Request r = plain(1);
    change(r);
    return !Sampler(8).begin(r, {}).is_ok();
  };
  for (float bad : {-1.0f, kNan, kInf}) {
    CHECK(refused([&](Request& r) { r.sampling.temperature = bad; }));
    CHECK(refused([&](Request& r) { r.sampling.top_p = bad; }));
    CHECK(refused([&](Request& r) { r.sampling.min_p = bad; }));
    CHECK(refused([&](Request& r) { r.sampling.repetition_penalty = bad; }));
  }
  CHECK(refused([](Request& r) { r.sampling.repetition_penalty = 0; }));
  CHECK(refused([](Request& r) { r.sampling.frequency_penalty = kNan; }));
  CHECK(refused([](Request& r) { r.bias = {{8, 1.0f}}; }));
  CHECK(refused([](Request& r) { r.bias = {{-1, 1.0f}}; }));
  CHECK(refused([](Request& r) { r.bias = {{1, kNan}}; }));
  CHECK(!refused([](Request& r) { r.sampling.top_k = 4000000000u; }));
}

TEST(sampler_survives_extreme_parameters) {
  std::vector<float> logits = {3e38f, -3e38f, 0, 1e-40f};
  for (float temperature : {1.1e-4f, 1.0f, 3e38f}) {
    for (float penalty : {1e-30f, 1.0f, 3e38f}) {
      Request r = plain(temperature);
      r.sampling.repetition_penalty = penalty;
      r.sampling.frequency_penalty = -3e38f;
      r.bias = {{0, 3e38f}, {1, -3e38f}, {0, 3e38f}};
      const auto p = probabilities(r, logits, {0, 1, 2, 3});
      CHECK(near(std::accumulate(p.begin(), p.end(), 0.0), 1));
    }
  }
}

// Draws follow the distribution: chi-square with 9 degrees of freedom, fixed seeds, 99.9% point.
TEST(sampler_draws_follow_the_distribution) {
  std::vector<float> logits(10);
  for (int i = 0; i < 10; ++i) logits[i] = 0.3f * static_cast<float>(i);
  for (uint64_t seed : {0ull, 1ull, 1337ull, ~0ull}) {
    Request r = plain(0.8f);
    r.sampling.seed = seed;
    const auto p = probabilities(r, logits);
    Sampler sampler(10);
    CHECK(sampler.begin(r, {}).is_ok());
    std::vector<double> seen(10);
    const int n = 20000;
    for (int i = 0; i < n; ++i) ++seen[pick(sampler, logits, i)];
    double chi = 0;
    for (int i = 0; i < 10; ++i) chi += (seen[i] - n * p[i]) * (seen[i] - n * p[i]) / (n * p[i]);
    CHECK(chi < 27.9);
  }
}

TEST(sampler_draw_depends_on_seed_and_position_only) {
  const std::vector<float> logits(100, 0.0f);
  Request r = plain(1);
  Sampler one(100), two(100);
  CHECK(one.begin(r, {}).is_ok() && two.begin(r, {}).is_ok());
  std::vector<int32_t> whole;
  for (uint64_t i = 0; i < 50; ++i) whole.push_back(pick(one, logits, i));
  for (uint64_t i = 25; i < 50; ++i) CHECK_EQ(pick(two, logits, i), whole[i]);  // resumed half way
  r.sampling.seed = 42;
  CHECK(two.begin(r, {}).is_ok());
  int same = 0;
  for (uint64_t i = 0; i < 50; ++i) same += pick(two, logits, i) == whole[i];
  CHECK(same < 10);
  CHECK_EQ(uniform(1337, 0), 0.1933164916588117);  // computed apart, from the definition: the same on every platform
  CHECK_EQ(uniform(~0ull, 100000), 0.12423738179155697);
}

TEST(sampler_reports_the_unmodified_distribution) {
  Request r = plain(0);
  r.report_logprobs = true;
  r.logprobs = 2;
  r.bias = {{0, 100.0f}};
  Sampler sampler(4);
  CHECK(sampler.begin(r, {}).is_ok());
  std::vector<float> logits = {std::log(0.1f), std::log(0.6f), kNan, std::log(0.3f)};
  TokenEvent event;
  CHECK(sampler.sample(logits.data(), {}, 0, nullptr, &event).is_ok());
  CHECK_EQ(event.id, 0);
  CHECK(near(event.logprob, std::log(0.1)));
  REQUIRE(event.top.size() == 2);
  CHECK(event.top[0].first == 1 && near(event.top[0].second, std::log(0.6)));
  CHECK(event.top[1].first == 3 && near(event.top[1].second, std::log(0.3)));
}

}  // namespace
}  // namespace smoe
