// argv -> engine -> protocol loop. stdout is the wire; everything for people goes to stderr.
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <sstream>

#include "core/options.h"
#include "protocol.h"
#include "serve.h"

namespace {

void log_line(const std::string& text) { std::fprintf(stderr, "%s\n", text.c_str()); }

int fail(const smoe::Status& status) {
  log_line("error: " + status.message() + (status.hint().empty() ? "" : "\n  " + status.hint()));
  return smoe::exit_code(status.code());
}

smoe::Result<std::string> read_tokens_file(const std::string& path) {
  std::ifstream file;
  if (path != "-") file.open(path, std::ios::binary);
  std::istream& in = path == "-" ? std::cin : file;
  std::ostringstream text;
  text << in.rdbuf();
  if (!in || text.bad()) return smoe::Status{smoe::Code::usage, "cannot read the --tokens-in file " + path};
  return std::move(text).str();
}

smoe::Status run_tokens_file(smoe::Engine& engine, smoe::Wire& wire, const smoe::Launch& launch,
                             const smoe::ServeOptions& options) {
  SMOE_ASSIGN(const std::string text, read_tokens_file(launch.tokens_file));
  smoe::Request request;
  SMOE_ASSIGN(request.ids, smoe::parse_id_file(text, engine.model().vocab));
  request.max_tokens = launch.max_tokens;
  request.sampling = options.defaults;
  return smoe::run_once(engine, wire, request, options, log_line);
}

smoe::Status run(smoe::Launch launch) {
  SMOE_TRY(smoe::resolve_window(&launch));
  SMOE_ASSIGN(const std::unique_ptr<smoe::Engine> engine, smoe::Engine::open(launch.engine, log_line));
  SMOE_ASSIGN(const std::unique_ptr<smoe::Wire> wire, smoe::open_wire(STDIN_FILENO, STDOUT_FILENO));
  const smoe::ServeOptions options{smoe::default_sampling(launch, engine->model().generation), launch.instrument};
  if (launch.serve) return smoe::serve(*engine, *wire, options, log_line);
  return run_tokens_file(*engine, *wire, launch, options);
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);  // a closed reader is an answer of write(), not the end of the process
  smoe::Result<smoe::Launch> launch = smoe::parse_launch({argv + 1, argv + argc});
  if (!launch.is_ok()) return fail(launch.status());
  if (launch->help || launch->version) {
    std::cout << (launch->help ? smoe::launch_help() : "smoe-engine " SMOE_VERSION "\n");
    return 0;
  }
  const smoe::Status status = run(std::move(launch).value());
  return status.is_ok() ? 0 : fail(status);
}
