#include <thread>

#include "check.h"
#include "tiny_vault.h"
#include "util/json.h"
#include "vault/format.h"
#include "vault/vault.h"

using namespace smoe;

namespace {

struct Fixture {
  FakeTree tree;
  std::string smoe, scout, folder;
  Fixture() : smoe(tiny::make(tree.root())), scout(tree.path("tiny.scout.safetensors")), folder(tree.root()) {}
};

std::string replace(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  if (at == std::string::npos) check::fail(__FILE__, __LINE__, "not in the manifest: " + from);
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

std::string replace_all(std::string text, const std::string& from, const std::string& to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
  return text;
}

// The tiny manifest with its mixture replaced by a second dense layer.
std::string dense(std::string text) {
  const size_t moe = text.find("{\"block\":\"moe\""), end = text.find("}}", moe);
  text.replace(moe, end + 1 - moe, R"({"block":"ffn","width":64,"activation":"silu")");
  for (const char* name : {"\"layers.1.router.weight\"", "\"layers.1.shared_gate.weight\""}) {
    const size_t from = text.find(name);
    text.erase(from - 1, text.find('}', from) + 2 - from);  // with the comma before it
  }
  return replace_all(text, "layers.1.shared.", "layers.1.ffn.");
}

bool mentions(const Status& s, const std::string& word) { return s.message().find(word) != std::string::npos; }

bool verifies(const std::string& path) { return verify_vault(path, nullptr).ok(); }

// Flips one bit at each of these places of a file in turn; every flip must be found, by open or by verify.
size_t undetected_flips(const std::string& vault, const std::string& path, size_t from, size_t to, size_t step) {
  const std::string good = tiny::read_file(path);
  size_t missed = 0;
  for (size_t at = from; at < std::min(to, good.size()); at += step) {
    tiny::write_byte(path, at, static_cast<char>(good[at] ^ (1 << (at % 8))));
    if (verifies(vault)) ++missed;
    tiny::write_byte(path, at, good[at]);
  }
  return missed;
}

}  // namespace

TEST(crc32c_vectors) {
  CHECK_EQ(crc32c("123456789", 9), 0xE3069283u);
  CHECK_EQ(crc32c("", 0), 0u);
  const std::string zeros(32, '\0'), ones(32, '\xFF');  // RFC 3720, B.4
  CHECK_EQ(crc32c(zeros.data(), 32), 0x8A9136AAu);
  CHECK_EQ(crc32c(ones.data(), 32), 0x62A8AB43u);
}

TEST(crc32c_is_the_same_by_any_path_and_in_pieces) {
  const std::string data = tiny::pattern(100000, 7);
  for (const size_t bytes : {1u, 7u, 8u, 4095u, 12287u, 12288u, 12289u, 24576u, 36871u, 99990u}) {
    for (const size_t from : {0u, 1u, 5u}) {
      const uint32_t want = crc32c_portable(data.data() + from, bytes);
      CHECK_EQ(crc32c(data.data() + from, bytes), want);
      const size_t cut = bytes / 3;
      CHECK_EQ(crc32c(data.data() + from + cut, bytes - cut, crc32c(data.data() + from, cut)), want);
    }
  }
}

TEST(sha256_vectors) {
  const auto sha = [](const std::string& text) {
    Sha256 s;
    s.update(text.data(), text.size());
    return s.hex();
  };
  CHECK_EQ(sha(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK_EQ(sha("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK_EQ(sha(std::string(1000000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(vault_opens_and_reads_back) {
  const Fixture f;
  const auto opened = open_vault(f.smoe);
  REQUIRE(opened.is_ok());
  const VaultFile& vault = opened.value();
  CHECK_EQ(vault.model.hidden, tiny::kHidden);
  CHECK_EQ(vault.model.moe_layers(), 1u);
  CHECK_EQ(vault.records.size(), 1u);
  CHECK_EQ(vault.records[0].size(), tiny::kExperts);
  CHECK_EQ(vault.model.eos_ids.size(), 2u);
  CHECK_EQ(vault.model.generation.top_k, 20);
  CHECK_EQ(vault.model.ropes[0].inv_freq[1], 0.1f);
  const std::string bytes = tiny::read_file(f.smoe);
  CHECK_EQ(bytes.size(), vault.file_bytes);
  const uint64_t end = record_layout(tiny::ffn(), tiny::kHidden).end;
  for (uint32_t e = 0; e < tiny::kExperts; ++e) {
    const ExpertRecord& r = vault.records[0][e];
    CHECK_EQ(r.offset % kRecordAlignment, 0u);
    CHECK(bytes.substr(r.offset, end) == tiny::pattern(end, e));
    CHECK(bytes.substr(r.offset + end, r.length - end) == std::string(r.length - end, '\0'));
  }
  const auto o = tiny::options(f.folder);
  for (size_t i = 0; i < o.trunk.size(); ++i) {
    std::string data(o.trunk[i].bytes, '\0');
    CHECK(read_trunk(vault, {}, {{o.trunk[i].name, reinterpret_cast<uint8_t*>(data.data())}}).is_ok());
    CHECK(data == tiny::pattern(data.size(), static_cast<uint32_t>(100 + i)));
  }
}

// The trunk as a stream: any selection of tensors, whichever way it is read, and more of it than is on its way at once.
TEST(vault_trunk_is_read_in_one_pass) {
  Fixture f;
  Result<VaultFile> opened = open_vault(f.smoe);
  REQUIRE(opened.is_ok());
  VaultFile vault = std::move(opened).value();
  // A file of its own, with tensors that begin anywhere and end with it in the middle of a block.
  std::string file(5000000 * 3 + 12345, 0);
  for (size_t i = 0; i < file.size(); ++i) file[i] = static_cast<char>(i * 2654435761u >> 13);
  f.tree.write("stream", file);
  vault.scout_path = f.tree.path("stream");
  vault.scout_bytes = file.size();
  const std::vector<TrunkEntry> entries = {
      {64, 5000}, {5064, 0}, {5064, 9000001}, {9005065, 63}, {12000000, file.size() - 12000000}};
  std::vector<std::string> memory;
  for (size_t i = 0; i < entries.size(); ++i) {
    const std::string name = std::to_string(i);
    vault.trunk[name] = entries[i];
    vault.model.tensors[name].crc32c = crc32c(file.data() + entries[i].offset, entries[i].bytes);
    memory.emplace_back(entries[i].bytes, 0);
  }
  const auto place = [&](size_t i) {
    return TrunkPlaces::value_type{std::to_string(i), reinterpret_cast<uint8_t*>(memory[i].data())};
  };
  for (const ReaderKind kind : {ReaderKind::automatic, ReaderKind::pread}) {
    for (const DirectMode mode : {DirectMode::automatic, DirectMode::buffered}) {
      for (unsigned chosen = 0; chosen < 32; chosen += 1 + (kind == ReaderKind::pread) * 6) {
        TrunkPlaces places;
        for (std::string& bytes : memory) std::fill(bytes.begin(), bytes.end(), 1);
        for (size_t i = 0; i < entries.size(); ++i)
          if (chosen >> i & 1) places.insert(place(i));
        CHECK(read_trunk(vault, {kind, mode, 4, {}}, places).is_ok());
        for (size_t i = 0; i < entries.size(); ++i) {
          const std::string right =
              chosen >> i & 1 ? file.substr(entries[i].offset, entries[i].bytes) : std::string(entries[i].bytes, 1);
          CHECK(memory[i] == right);
        }
      }
    }
  }
  vault.model.tensors["2"].crc32c ^= 1;
  const Status damaged = read_trunk(vault, {}, {place(0), place(2), place(4)});
  CHECK(damaged.code() == Code::corrupt && mentions(damaged, "tensor 2"));
  CHECK(read_trunk(vault, {}, {place(0), place(4)}).is_ok());
  CHECK(read_trunk(vault, {}, {{"no such tensor", nullptr}}).code() == Code::usage);
  std::filesystem::resize_file(vault.scout_path, 8000000);
  const Status cut = read_trunk(vault, {}, {place(0), place(4)});
  CHECK(cut.code() == Code::corrupt && mentions(cut, vault.scout_path));
}

TEST(vault_without_experts) {
  const FakeTree tree;
  WriterOptions o = tiny::options(tree.root());
  o.layers.clear();
  for (scout::Tensor& t : o.trunk) t.name = replace_all(t.name, "layers.1.shared.", "layers.1.ffn.");
  std::erase_if(o.trunk,
                [](const scout::Tensor& t) { return t.name.find("router") + 1 || t.name.find("shared_gate") + 1; });
  auto writer = VaultWriter::open(o);
  REQUIRE(writer.is_ok());
  for (const scout::Tensor& t : o.trunk)
    CHECK((*writer)->write_tensor(t.name, tiny::pattern(t.bytes, 1).data(), t.bytes).is_ok());
  const std::string text =
      tiny::manifest((*writer)->scout_bytes(), (*writer)->scout_header_crc(), [&](const std::string& name) {
        const auto crc = (*writer)->tensor_crc(replace_all(name, "layers.1.shared.", "layers.1.ffn."));
        return crc.is_ok() ? crc.value() : 0;
      });
  CHECK((*writer)->finish(dense(text)).is_ok());
  auto vault = open_vault(tree.path("tiny.smoe"));
  REQUIRE(vault.is_ok());
  CHECK(vault->records.empty() && vault->model.moe_layers() == 0 && vault->model.max_top_k() == 0);
  CHECK_EQ(vault->file_bytes, format::kRecordsOffset + vault->manifest_json.size());
  tiny::write_tokenizer(tree.path("tiny.tokenizer"));
  CHECK(verifies(tree.path("tiny.smoe")));
}

TEST(vault_written_by_many_threads) {
  const FakeTree tree;
  const WriterOptions o = tiny::options(tree.root());
  auto writer = VaultWriter::open(o);
  REQUIRE(writer.is_ok());
  std::vector<std::thread> threads;
  for (int n = 0; n < 4; ++n) threads.emplace_back([&] { CHECK(tiny::fill(**writer, o).is_ok()); });
  for (std::thread& thread : threads) thread.join();
  tiny::write_tokenizer(tree.path("tiny.tokenizer.part"));
  CHECK((*writer)->finish(tiny::manifest_for(**writer)).is_ok());
  CHECK(verifies(tree.path("tiny.smoe")));
}

TEST(vault_verify_counts_every_byte) {
  const Fixture f;
  uint64_t last = 0, total = 0;
  const auto report = verify_vault(f.smoe, [&](uint64_t done, uint64_t all) {
    CHECK(done > last);
    last = done, total = all;
    return true;
  });
  CHECK(report.ok());
  uint64_t bytes = std::filesystem::file_size(f.smoe) + std::filesystem::file_size(f.scout);
  for (const auto& [name, text] : tiny::tokenizer()) bytes += text.size();
  CHECK_EQ(report.checked_bytes, bytes);
  CHECK_EQ(last, total);
  CHECK_EQ(total, bytes);
  CHECK(!verify_vault(f.smoe, [](uint64_t, uint64_t) { return false; }).ok());
}

// Every byte of header, table, manifest, scout header and small files; elsewhere one byte in 61, at a bit that moves
// along.
TEST(vault_verify_finds_any_flipped_bit) {
  const Fixture f;
  auto vault = open_vault(f.smoe);
  REQUIRE(vault.is_ok());
  const size_t table = vault->file_bytes - vault->manifest_json.size() - tiny::kExperts * format::kEntryBytes;
  CHECK_EQ(undetected_flips(f.smoe, f.smoe, 0, 128, 1), 0u);
  CHECK_EQ(undetected_flips(f.smoe, f.smoe, 128, table, 61), 0u);
  CHECK_EQ(undetected_flips(f.smoe, f.smoe, table, SIZE_MAX, 1), 0u);
  const size_t scout_header = vault->trunk.at("final_norm.weight").offset;  // the first tensor: it is f32
  CHECK_EQ(undetected_flips(f.smoe, f.scout, 0, scout_header, 1), 0u);
  CHECK_EQ(undetected_flips(f.smoe, f.scout, scout_header, SIZE_MAX, 61), 0u);
  for (const auto& [name, entry] : vault->trunk) {
    CHECK_EQ(undetected_flips(f.smoe, f.scout, entry.offset, entry.offset + 1, 1), 0u);
    CHECK_EQ(undetected_flips(f.smoe, f.scout, entry.offset + entry.bytes - 1, entry.offset + entry.bytes, 1), 0u);
  }
  for (const auto& [name, text] : tiny::tokenizer()) {
    CHECK_EQ(undetected_flips(f.smoe, f.folder + "/tiny.tokenizer/" + name, 0, SIZE_MAX, 1), 0u);
  }
  CHECK(verifies(f.smoe));
}

TEST(vault_errors_name_the_place) {
  const Fixture f;
  auto vault = open_vault(f.smoe);
  REQUIRE(vault.is_ok());
  const std::string smoe = tiny::read_file(f.smoe), scout = tiny::read_file(f.scout);
  const auto errors_with = [&](const std::string& path, size_t at) {
    const std::string good = tiny::read_file(path);
    tiny::write_byte(path, at, static_cast<char>(good[at] ^ 1));
    const VerifyReport report = verify_vault(f.smoe, nullptr);
    tiny::write_byte(path, at, good[at]);
    return report.errors.size() == 1 ? report.errors[0] : "";
  };
  const auto in = [](const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; };
  CHECK(in(errors_with(f.smoe, vault->records[0][2].offset + 5), "record of layer 1, expert 2"));
  CHECK(in(errors_with(f.smoe, vault->records[0][0].offset + vault->records[0][0].length - 1), "layer 1, expert 0"));
  CHECK(in(errors_with(f.smoe, 5000), "4096 to 16383"));
  CHECK(in(errors_with(f.smoe, 30), "header: its checksum"));
  CHECK(in(errors_with(f.smoe, smoe.size() - 1), "manifest: its checksum"));
  CHECK(in(errors_with(f.scout, vault->trunk.at("embed.weight").offset + 3), "tensor embed.weight"));
  CHECK(in(errors_with(f.scout, 20), "its header"));
  CHECK(in(errors_with(f.folder + "/tiny.tokenizer/tokenizer.json", 0), "tokenizer.json: its SHA-256"));
}

TEST(vault_any_length_but_its_own_is_refused) {
  const Fixture f;
  for (const std::string& path : {f.smoe, f.scout}) {
    const std::string good = tiny::read_file(path);
    std::vector<size_t> lengths = {0, 1, 7, 8, 9, 95, 4095, 4096, 4097, 16383, 16384, 16385, 32768, good.size() + 1};
    for (size_t cut = 1; cut < 40; ++cut) lengths.push_back(good.size() - cut);
    for (size_t length = 0; length < good.size(); length += 997) lengths.push_back(length);
    for (const size_t length : lengths) {
      std::string bad = good;
      bad.resize(length);
      tiny::write_file(path, bad);
      const auto opened = open_vault(f.smoe);
      CHECK(!opened.is_ok() && opened.status().code() == Code::corrupt && !opened.status().hint().empty());
      CHECK(!verifies(f.smoe));
    }
    tiny::write_file(path, good);
  }
  CHECK(verifies(f.smoe));
}

TEST(vault_tokenizer_files_missing_longer_or_more) {
  const Fixture f;
  const std::string file = f.folder + "/tiny.tokenizer/tokenizer.json", text = tiny::read_file(file);
  tiny::write_file(file, text + "\n");
  CHECK(!verifies(f.smoe));
  std::filesystem::remove(file);
  CHECK(!verifies(f.smoe));
  tiny::write_file(file, text);
  CHECK(verifies(f.smoe));
  tiny::write_file(f.folder + "/tiny.tokenizer/added_tokens.json", "{}");
  CHECK(!verifies(f.smoe));
}

TEST(vault_open_says_what_is_wrong) {
  const Fixture f;
  const auto expect = [&](const Result<VaultFile>& opened, Code code, const std::string& words) {
    CHECK(!opened.is_ok() && opened.status().code() == code && mentions(opened.status(), words));
  };
  expect(open_vault(f.folder + "/none.smoe"), Code::usage, "there is no such vault");
  expect(open_vault(f.folder), Code::corrupt, "not a regular file");
  const std::string scout = tiny::read_file(f.scout), smoe = tiny::read_file(f.smoe);
  std::filesystem::remove(f.scout);
  expect(open_vault(f.smoe), Code::corrupt, "missing");
  tiny::write_file(f.scout, scout + "x");
  expect(open_vault(f.smoe), Code::corrupt, "bytes, the vault asks for");
  tiny::write_file(f.scout, scout);
  std::string foreign = smoe;
  foreign.replace(0, 8, std::string("SMOE\xDE\xEA\x00\x01", 8));
  tiny::write_file(f.smoe, foreign);
  expect(open_vault(f.smoe), Code::corrupt, "S-MoE");
  tiny::write_file(f.smoe, std::string("GGUF").append(smoe, 4));
  expect(open_vault(f.smoe), Code::corrupt, "not a vault");
  std::string newer = smoe;
  newer[8] = 2;
  tiny::write_file(f.smoe, newer);
  expect(open_vault(f.smoe), Code::corrupt, "version 2");
}

TEST(manifest_refuses) {
  const std::string good = tiny::manifest();
  CHECK(parse_manifest(good).is_ok());
  const struct {
    const char *from, *to, *field;
  } cases[] = {
      {R"("format":1)", R"("format":2)", "format"},
      {R"("hidden":32)", R"("hidden":0)", "arch.hidden"},
      {R"("hidden":32)", R"("hidden":4294967328)", "arch.hidden"},
      {R"("hidden":32)", R"("hidden":262144)", "arch.hidden"},
      {R"("hidden":32)", R"("hidden":-1)", "arch.hidden"},
      {R"("hidden":32)", R"("hidden":"32")", "arch.hidden"},
      {R"("hidden":32)", R"("hidden":32.5)", "arch.hidden"},
      {R"("hidden":32,)", "", "arch.hidden"},
      {R"("vocab":48)", R"("vocab":99999999)", "arch.vocab"},
      {R"("vocab":48)", R"("vocab":47)", "embed.weight.shape"},
      {R"("norm_eps":1e-06)", R"("norm_eps":1e999)", "arch.norm_eps"},
      {R"("norm_eps":1e-06)", R"("norm_eps":-1)", "arch.norm_eps"},
      {R"("norm_eps":1e-06)", R"("norm_eps":1e-06,"beta":1)", "arch.beta"},
      {R"("tied_head":false)", R"("tied_head":true)", "embed.weight.layout"},
      {R"("tied_head":false)", R"("tied_head":0)", "arch.tied_head"},
      {R"("inv_freq":[1.0,0.1])", R"("inv_freq":[1.0,1e39])", "inv_freq"},
      {R"("inv_freq":[1.0,0.1])", R"("inv_freq":[1,1,1,1,1])", "rotates more"},
      {R"("heads":4)", R"("heads":5)", "kv_heads"},
      {R"("kv_heads":2)", R"("kv_heads":0)", "kv_heads"},
      {R"("kv_heads":2)", R"("kv_heads":4)", "attn.k.weight.shape"},
      {R"("head_dim":8)", R"("head_dim":1000000)", "head_dim"},
      {R"("rope":0)", R"("rope":1)", "rope"},
      {R"("block":"gqa")", R"("block":"none")", "block"},
      {R"("block":"ffn")", R"("block":"glu")", "block"},
      {R"("activation":"silu")", R"("activation":"gelu")", "activation"},
      {R"("qk_norm":"head")", R"("qk_norm":"both")", "qk_norm"},
      {R"("qk_norm":"head")", R"("qk_norm":"none")", "q_norm"},
      {R"("experts":3)", R"("experts":1)", "top_k"},
      {R"("top_k":2,"expert)", R"("top_k":0,"expert)", "top_k"},
      {R"("down":"f16")", R"("down":"q4_k")", "encodings.down"},
      {R"("gate":"q8_0")", R"("gate":"q9_0")", "unknown encoding"},
      {R"("gate":"q8_0")", R"("gate":"q4_k")", "encodings.gate"},
      {R"("scaling":1.0)", R"("scaling":null)", "scaling"},
      {R"("shared_width":64)", R"("shared_width":0)", "shared_gate"},
      {R"("eos_ids":[2,0])", R"("eos_ids":[2,48])", "eos_ids"},
      {R"("eos_ids":[2,0])", R"("eos_ids":[-1])", "eos_ids"},
      {R"("bos_id":1)", R"("bos_id":48)", "bos_id"},
      {R"("top_p":0.8)", R"("top_p":1.5)", "generation.top_p"},
      {R"("repetition_penalty":1.05)", R"("repetition_penalty":0)", "generation.repetition_penalty"},
      {R"("final_norm.weight":{)", R"("final_norm.scale":{)", "final_norm.scale"},
      {R"("encoding":"f32","layout":"rows","shape":[32])", R"("encoding":"q8_0","layout":"rows","shape":[32])",
       "encoding"},
      {R"("layout":"rows","shape":[32])", R"("layout":"panel16","shape":[32])", "layout"},
      {R"("layout":"rows","shape":[32])", R"("layout":"rows","shape":[1,32])", "shape"},
      {R"("layers":[)", R"("layers":[],"layer":[)", "arch.layer "},
  };
  for (const auto& c : cases) {
    const auto parsed = parse_manifest(replace(good, c.from, c.to));
    if (parsed.is_ok()) {
      check::fail(__FILE__, __LINE__, std::string("accepted ") + c.to);
    } else if (parsed.status().code() != Code::corrupt || !mentions(parsed.status(), c.field)) {
      check::fail(__FILE__, __LINE__, std::string(c.to) + ": " + parsed.status().message());
    }
  }
}

TEST(manifest_refuses_recurrent_blocks_out_of_range) {
  const std::string good = tiny::manifest();
  const size_t from = good.find(R"({"block":"gqa")"), to = good.find('}', from) + 1;
  const std::string heads = R"("block":"delta","taps":4,"key_dim":8,"value_dim":8,"eps":1e-6,"heads":4,"key_heads":)";
  const struct {
    std::string block;
    const char* field;
  } cases[] = {
      {R"({"block":"short_conv","taps":1,"value_dim":32})", "taps"},
      {R"({"block":"short_conv","taps":17,"value_dim":32})", "taps"},
      {R"({"block":"short_conv","taps":3,"value_dim":0})", "value_dim"},
      {R"({"block":"short_conv","taps":3,"value_dim":32,"heads":2})", "heads"},
      {R"({"block":"short_conv","taps":3,"value_dim":32})", "tensor that no layer asks for"},
      {"{" + heads + "3}", "key_heads"},
      {"{" + heads + "2,\"channel_decay\":true}", "channel_decay"},
      {"{" + heads + "4,\"rank\":4294967295}", "rank"},
      {"{" + heads + "4,\"tiled\":1}", "tiled"},
      {"{" + heads + "4,\"negative_rates\":1}", "negative_rates"},
      {R"({"block":"mamba","taps":4,"value_dim":64,"key_dim":1025,"rank":4,"eps":1e-6})", "key_dim"},
      {R"({"block":"mamba","taps":4,"value_dim":64,"key_dim":16,"rank":0,"eps":1e-6})", "rank"},
      {R"({"block":"mamba2","taps":4,"heads":4096,"key_heads":1,"key_dim":8,"value_dim":4096,"eps":1e-6})", "channels"},
  };
  for (const auto& c : cases) {
    const auto parsed = parse_manifest(good.substr(0, from) + c.block + good.substr(to));
    if (parsed.is_ok()) {
      check::fail(__FILE__, __LINE__, "accepted " + c.block);
    } else if (parsed.status().code() != Code::corrupt || !mentions(parsed.status(), c.field)) {
      check::fail(__FILE__, __LINE__, c.block + ": " + parsed.status().message());
    }
  }
}

TEST(manifest_needs_every_tensor) {
  const std::string good = tiny::manifest();
  for (const tiny::Trunk& t : tiny::trunk()) {
    const size_t from = good.find("\"" + t.name + "\":{"), to = good.find("}", from) + 1;
    std::string without = good.substr(0, from) + good.substr(good[to] == ',' ? to + 1 : to);
    without = good[to] == ',' ? without : without.erase(from - 1, 1);
    const bool optional = t.name.ends_with(".bias");
    const auto parsed = parse_manifest(without);
    CHECK_EQ(parsed.is_ok(), optional);
    if (!parsed.is_ok()) CHECK(mentions(parsed.status(), t.name + " is missing"));
  }
}

TEST(record_layout_places_matrices_at_64_bytes) {
  const FfnSpec ffn = tiny::ffn();
  const RecordLayout r = record_layout(ffn, tiny::kHidden);
  CHECK_EQ(r.gate, 0u);
  CHECK_EQ(r.up, 64u * 34);                            // 64 rows of one Q8_0 block, a multiple of 64
  CHECK_EQ(r.down, (r.up + 64u * 18 + 63) / 64 * 64);  // Q4_0
  CHECK_EQ(r.end, r.down + 32u * 64 * 2);              // f16
  CHECK_EQ(r.length, kRecordAlignment);
}

TEST(encoding_names_come_back) {
  for (const Encoding e : all_encodings()) {
    Encoding back{};
    CHECK(parse_encoding(encoding_name(e), &back) && back == e);
    CHECK_EQ(std::string(encoding_name(e)), encoding_info(e).name);
  }
  Encoding none{};
  CHECK(!parse_encoding("Q8_0", &none) && !parse_encoding("", &none));
}
