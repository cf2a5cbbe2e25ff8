// A small vault in a temporary folder, for the tests and the fuzzer: layer 0 is dense, layer 1 a mixture of three
// experts with a shared one. Its contents are arbitrary bytes.
#pragma once

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "fake_tree.h"
#include "quant/quant.h"
#include "util/sha256.h"
#include "vault/manifest.h"
#include "vault/writer.h"

namespace tiny {

namespace fs = std::filesystem;

inline constexpr uint32_t kHidden = 32, kVocab = 48, kExperts = 3, kWidth = 64;

inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Written over what is there: some file systems flush a file that was cut to nothing first.
inline void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::app).flush();  // exists from here on
  std::fstream out(path, std::ios::binary | std::ios::in | std::ios::out);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  out.close();
  fs::resize_file(path, bytes.size());
}

inline void write_byte(const std::string& path, size_t at, char byte) {
  std::fstream out(path, std::ios::binary | std::ios::in | std::ios::out);
  out.seekp(static_cast<std::streamoff>(at)).put(byte);
}

inline std::string pattern(uint64_t bytes, uint32_t seed) {
  std::string out(bytes, '\0');
  uint32_t x = seed * 2654435761u + 1;
  for (char& c : out) {
    x = x * 1664525u + 1013904223u;
    c = static_cast<char>(x >> 24);
  }
  return out;
}

struct Trunk {
  std::string name, encoding, layout;
  std::vector<uint64_t> shape;
};

inline std::vector<Trunk> trunk() {
  std::vector<Trunk> all = {{"embed.weight", "q8_0", "rows", {kVocab, kHidden}},
                            {"final_norm.weight", "f32", "rows", {kHidden}},
                            {"head.weight", "q8_0", "panel16", {kVocab, kHidden}}};
  for (const std::string p : {"layers.0.", "layers.1."}) {
    for (const char* norm : {"attn_norm.weight", "ffn_norm.weight"})
      all.push_back({p + norm, "f32", "rows", {kHidden}});
    all.push_back({p + "attn.q.weight", "q8_0", "panel16", {32, kHidden}});
    all.push_back({p + "attn.q.bias", "bf16", "rows", {32}});
    all.push_back({p + "attn.k.weight", "bf16", "rows", {16, kHidden}});
    all.push_back({p + "attn.v.weight", "f16", "rows", {16, kHidden}});
    all.push_back({p + "attn.o.weight", "q4_0", "panel16", {kHidden, 32}});
    all.push_back({p + "attn.q_norm.weight", "f32", "rows", {8}});
    all.push_back({p + "attn.k_norm.weight", "f32", "rows", {8}});
  }
  for (const std::string p : {"layers.0.ffn.", "layers.1.shared."}) {
    all.push_back({p + "gate.weight", "q8_0", "panel16", {kWidth, kHidden}});
    all.push_back({p + "up.weight", "q8_0", "panel16", {kWidth, kHidden}});
    all.push_back({p + "down.weight", "q8_0", "panel16", {kHidden, kWidth}});
  }
  all.push_back({"layers.1.router.weight", "f32", "rows", {kExperts, kHidden}});
  all.push_back({"layers.1.shared_gate.weight", "f32", "rows", {1, kHidden}});
  return all;
}

inline smoe::FfnSpec ffn() {
  smoe::FfnSpec f;
  f.experts = kExperts;
  f.expert_width = kWidth;
  f.encodings = {smoe::Encoding::q8_0, smoe::Encoding::q4_0, smoe::Encoding::f16};
  return f;
}

inline std::map<std::string, std::string> tokenizer() {
  return {{"tokenizer.json", "{\"model\": {}}"}, {"chat_template.jinja", "{{ messages }}"}, {"extra/note.txt", "note"}};
}

// crc(name) gives a tensor's checksum.
template <class Crc>
std::string manifest(uint64_t scout_bytes, uint32_t scout_crc, Crc&& crc) {
  std::ostringstream out;
  out << R"({"format":1,"id":"tiny","family":"qwen2_moe","model_type":"qwen2_moe","quant":"q8","converter":"test",)"
      << R"("source":{"fingerprint":"sha256:0","kind":"safetensors","bytes":1},"eos_ids":[2,0],"bos_id":1,)"
      << R"("generation":{"temperature":0.7,"top_p":0.8,"top_k":20,"repetition_penalty":1.05},"scout":{"bytes":)"
      << scout_bytes << R"(,"header_crc32c":)" << scout_crc << R"(},"tokenizer":{"template_sha256":null,"files":{)";
  const char* comma = "";
  for (const auto& [name, text] : tokenizer()) {
    smoe::Sha256 sha;
    sha.update(text.data(), text.size());
    out << comma << "\"" << name << R"(":{"bytes":)" << text.size() << R"(,"sha256":")" << sha.hex() << "\"}";
    comma = ",";
  }
  const char* attention =
      R"({"attention":{"block":"gqa","heads":4,"kv_heads":2,"head_dim":8,"scale":0.35355338,"window":0,)"
      R"("qk_norm":"head","qkv_clip":0.0,"rope":0},"ffn":)";
  out << R"(}},"arch":{"hidden":)" << kHidden << R"(,"vocab":)" << kVocab
      << R"(,"max_positions":512,"norm_eps":1e-06,"tied_head":false,"ropes":[{"inv_freq":[1.0,0.1],"scale":1.0}],)"
      << R"("layers":[)" << attention << R"({"block":"ffn","width":)" << kWidth << R"(,"activation":"silu"}},)"
      << attention << R"({"block":"moe","experts":)" << kExperts << R"(,"top_k":2,"expert_width":)" << kWidth
      << R"(,"normalize":true,"scaling":1.0,"activation":"silu","shared_width":)" << kWidth
      << R"(,"shared_gate":true,"encodings":{"gate":"q8_0","up":"q4_0","down":"f16"}}}]},"tensors":{)";
  comma = "";
  for (const Trunk& t : trunk()) {
    out << comma << "\"" << t.name << R"(":{"encoding":")" << t.encoding << R"(","layout":")" << t.layout
        << R"(","shape":)" << smoe::shape_text(t.shape) << R"(,"error":0.01,"crc32c":)" << crc(t.name) << "}";
    comma = ",";
  }
  out << R"(},"expert_errors":{}})";
  return out.str();
}

inline std::string manifest() {
  return manifest(8, 0, [](const std::string&) { return 0u; });
}

inline smoe::WriterOptions options(const std::string& folder) {
  smoe::WriterOptions o;
  o.folder = folder;
  o.stem = "tiny";
  o.fingerprint = "sha256:0";
  o.layers.push_back({1, kExperts, smoe::record_layout(ffn(), kHidden).length});
  for (const Trunk& t : trunk()) {
    smoe::Encoding e{};
    smoe::parse_encoding(t.encoding, &e);
    const uint64_t rows = t.shape.size() == 2 ? t.shape[0] : 1;
    const auto layout = t.layout == "rows" ? smoe::Layout::rows : smoe::Layout::panel16;
    const uint64_t bytes = smoe::stored_bytes(e, layout, rows, t.shape.back());
    const bool plain = smoe::encoding_info(e).plain;
    const char* dtype = t.encoding == "f32" ? "F32" : t.encoding == "f16" ? "F16" : "BF16";
    o.trunk.push_back({t.name, plain ? dtype : "U8", plain ? t.shape : std::vector<uint64_t>{bytes}, bytes});
  }
  return o;
}

// Writes every item, or only those that are not there yet.
inline smoe::Status fill(smoe::VaultWriter& w, const smoe::WriterOptions& o, bool missing_only = false) {
  const auto records = w.done_records();
  const auto tensors = w.done_tensors();
  const uint64_t end = smoe::record_layout(ffn(), kHidden).end;
  for (uint32_t e = 0; e < kExperts; ++e) {
    if (missing_only && std::count(records.begin(), records.end(), std::pair(0u, e)) > 0) continue;
    const std::string data = pattern(end, e);
    SMOE_TRY(w.write_record(0, e, data.data(), data.size()));
  }
  for (size_t i = 0; i < o.trunk.size(); ++i) {
    if (missing_only && std::count(tensors.begin(), tensors.end(), o.trunk[i].name) > 0) continue;
    const std::string data = pattern(o.trunk[i].bytes, static_cast<uint32_t>(100 + i));
    SMOE_TRY(w.write_tensor(o.trunk[i].name, data.data(), data.size()));
  }
  return smoe::Status::ok();
}

inline void write_tokenizer(const std::string& folder) {
  for (const auto& [name, text] : tokenizer()) {
    const std::string path = folder + "/" + name;
    fs::create_directories(fs::path(path).parent_path());
    write_file(path, text);
  }
}

inline std::string manifest_for(const smoe::VaultWriter& w) {
  return manifest(w.scout_bytes(), w.scout_header_crc(),
                  [&](const std::string& name) { return w.tensor_crc(name).value(); });
}

// A whole vault; the path of its .smoe, or "" with the reason on stderr.
inline std::string make(const std::string& folder) {
  const auto o = options(folder);
  auto writer = smoe::VaultWriter::open(o);
  smoe::Status status = writer.is_ok() ? fill(**writer, o) : writer.status();
  if (status.is_ok()) {
    write_tokenizer(folder + "/tiny.tokenizer.part");
    status = (*writer)->finish(manifest_for(**writer));
  }
  if (status.is_ok()) return folder + "/tiny.smoe";
  std::fprintf(stderr, "tiny vault: %s\n", status.message().c_str());
  return "";
}

}  // namespace tiny
