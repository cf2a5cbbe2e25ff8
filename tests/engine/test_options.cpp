#include "check.h"
#include "core/options.h"

namespace smoe {
namespace {

Result<Launch> parse(std::vector<std::string_view> args) {
  args.insert(args.begin(), {"--vault", "v.smoe", "--serve"});
  return parse_launch(args);
}

TEST(options_the_seeds_command_line) {
  const auto l = parse_launch({"--vault", "v/m.smoe", "--scout", "v/m.scout.safetensors", "--serve", "--ring", "0",
                               "--workers", "4", "--temperature", "0.6", "--top-p", "0.95", "--top-k", "50",
                               "--rep-penalty", "1.1", "--raw-ids"});
  REQUIRE(l.is_ok());
  const Launch& launch = l.value();
  CHECK_EQ(launch.engine.vault, "v/m.smoe");
  CHECK_EQ(launch.engine.scout, "v/m.scout.safetensors");
  CHECK(launch.serve && launch.engine.plan.ring_slots == 0 && launch.engine.io_workers == 4);
  CHECK_EQ(launch.engine.plan.threads, 0u);
  const Sampling s = default_sampling(launch, {});
  CHECK(s.temperature == 0.6f && s.top_p == 0.95f && s.top_k == 50 && s.repetition_penalty == 1.1f && s.seed == 1337);
}

TEST(options_every_flag_reaches_its_place) {
  auto l = parse({"--budget=7.5g",
                  "--ctx",
                  "8192",
                  "--threads",
                  "3",
                  "--io",
                  "pread",
                  "--direct",
                  "--isa",
                  "scalar",
                  "--verify-reads",
                  "--activations",
                  "float",
                  "--kv",
                  "f32",
                  "--experts-per-token",
                  "2",
                  "--sessions",
                  "4",
                  "--seed",
                  "18446744073709551615",
                  "--min-p",
                  "0.05",
                  "--exempt",
                  "1,2,30",
                  "--chunk",
                  "64",
                  "--spec",
                  "0",
                  "--instrument",
                  "--max-tokens",
                  "9"});
  REQUIRE(l.is_ok());
  const EngineOptions& e = l->engine;
  CHECK_EQ(e.plan.budget_bytes, 7680ull << 20);
  CHECK(e.plan.ctx == 8192 && e.plan.threads == 3 && e.io == IoBackend::pread && e.read_mode == ReadMode::direct);
  CHECK(e.isa == "scalar" && e.verify_reads && e.plan.float_activations && e.plan.kv == KvType::f32);
  CHECK(e.plan.experts_per_token == 2 && e.plan.sessions == 4 && e.plan.chunk == 64 && e.spec == 0);
  CHECK(e.penalty_exempt == std::vector<int32_t>({1, 2, 30}));
  CHECK(l->instrument && l->max_tokens == 9 && l->seed == ~uint64_t{0} && l->min_p == 0.05f);
  CHECK(parse({"--ctx", "max"})->ctx_max);
  CHECK(parse({"--buffered"})->engine.read_mode == ReadMode::buffered);
  CHECK(parse({"--budget", "auto"})->engine.plan.budget_bytes == 0);
  CHECK(parse_launch({"--help"}).is_ok() && parse_launch({"--version"}).is_ok());
}

TEST(options_refusals_name_the_flag) {
  for (const auto& [name, value] : std::vector<std::pair<const char*, const char*>>{{"--ctx", "0"},
                                                                                    {"--ctx", "-1"},
                                                                                    {"--ctx", "many"},
                                                                                    {"--budget", "8X"},
                                                                                    {"--budget", "-1G"},
                                                                                    {"--budget", "G"},
                                                                                    {"--budget", "1e30T"},
                                                                                    {"--budget", "nan"},
                                                                                    {"--budget", "inf"},
                                                                                    {"--ring", "x"},
                                                                                    {"--threads", "1.5"},
                                                                                    {"--io", "mmap"},
                                                                                    {"--kv", "q4"},
                                                                                    {"--activations", "int4"},
                                                                                    {"--sessions", "0"},
                                                                                    {"--temperature", "-1"},
                                                                                    {"--temperature", "nan"},
                                                                                    {"--top-p", "1.5"},
                                                                                    {"--top-k", "-1"},
                                                                                    {"--min-p", "2"},
                                                                                    {"--rep-penalty", "0"},
                                                                                    {"--seed", "-1"},
                                                                                    {"--exempt", "1,x"},
                                                                                    {"--exempt", "-1"},
                                                                                    {"--experts-per-token", "0"},
                                                                                    {"--cache-policy", "bogus"},
                                                                                    {"--cache-policy", "lru:0"},
                                                                                    {"--max-tokens", "0"},
                                                                                    {"--isa", ""}}) {
    const auto l = parse({name, value});
    CHECK(!l.is_ok() && l.status().code() == Code::usage);
    CHECK_EQ(l.status().message().find(name), 0u);
  }
  CHECK_EQ(std::string(parse({"--bogus"}).status().message()), "unknown flag --bogus");
  CHECK_EQ(std::string(parse({"stray"}).status().message()), "unknown flag stray");
  CHECK(!parse({"--ctx"}).is_ok());
  CHECK(!parse({"--serve=1"}).is_ok());
  CHECK(!parse_launch({}).is_ok());
  CHECK(!parse_launch({"--vault", "v"}).is_ok());
  CHECK(!parse({"--tokens-in", "f"}).is_ok());  // together with --serve
}

TEST(options_sampling_precedence) {
  GenerationDefaults vault;
  vault.temperature = 0.9f, vault.top_k = 20, vault.top_p = 1.0f;
  const Sampling s = default_sampling(parse({"--temperature", "0"}).value(), vault);
  CHECK_EQ(s.temperature, 0.0f);  // the flag
  CHECK_EQ(s.top_k, 20u);         // the vault
  CHECK_EQ(s.top_p, 1.0f);
  CHECK_EQ(s.repetition_penalty, 1.1f);  // neither
  CHECK_EQ(default_sampling(parse({"--top-k", "9999"}).value(), {}).top_k, 1024u);
}

TEST(options_sizes) {
  uint64_t bytes = 0;
  CHECK(parse_size("1024", &bytes) && bytes == 1024);
  CHECK(parse_size("512M", &bytes) && bytes == 512ull << 20);
  CHECK(parse_size("0.5T", &bytes) && bytes == 512ull << 30);
  for (const char* bad : {"", "K", "0", "0G", "-1", "1KB", "1 K", "1e3", "99999999999T", "0.1"})
    CHECK(!parse_size(bad, &bytes));
}

TEST(options_exit_codes_and_help) {
  CHECK(exit_code(Code::ok) == 0 && exit_code(Code::failed) == 1 && exit_code(Code::usage) == 2);
  CHECK(exit_code(Code::resources) == 3 && exit_code(Code::corrupt) == 4 && exit_code(Code::io) == 1);
  for (const char* flag : {"--vault FILE", "--rep-penalty F", "--ctx N|max"})
    CHECK(launch_help().find(flag) != std::string::npos);
}

}  // namespace
}  // namespace smoe
