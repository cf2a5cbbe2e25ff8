// Code in colours, by its words only: comments, strings, numbers, keywords. Good enough to read by, for any language.

import { h } from "./dom.js";

const LIMIT = 60_000; // characters; longer code stays plain

const KEYWORDS = new Set(
  (
    "and as assert async await auto bool boolean break byte case catch char class const constexpr continue " +
    "crate def default defer del delete do done double elif else elsif enum esac except export extends extern " +
    "false False fi final finally float fn for foreach from func function global go goto if impl implements " +
    "import in include inline int interface is lambda let long loop match mod module mut namespace new nil " +
    "None nonlocal not null nullptr or package pass private protected pub public raise ref register return " +
    "self short signed sizeof static struct super switch template then this throw trait true True try type " +
    "typedef typename typeof union unless unsafe unsigned until use using var virtual void volatile when where " +
    "while with yield"
  ).split(" "),
);
const SQL = new Set(
  (
    "select from where insert into values update set delete create table drop alter join left right inner " +
    "outer on group by order having limit offset union all distinct as and or not null is in like between case " +
    "when then else end index primary key foreign references default"
  ).split(" "),
);
const PLAIN = new Set(["", "text", "txt", "plain", "plaintext", "output", "console", "log", "md", "markdown", "diff"]);
const HASH = new Set(
  (
    "py python sh bash shell zsh rb ruby yaml yml toml make makefile dockerfile perl r cmake ini conf elixir julia nim " +
    "powershell ps1"
  ).split(" "),
);
const DASH = new Set(["sql", "lua", "haskell", "hs", "ada", "vhdl"]);

const STRING = [
  `"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)`,
  `"(?:\\\\.|[^"\\\\\\n])*"?|'(?:\\\\.|[^'\\\\\\n])*'?`,
  `\`(?:\\\\.|[^\`\\\\])*\`?`,
].join("|");
const NUMBER = "\\b\\d[\\w.]*";
const WORD = "[A-Za-z_$][\\w$]*";

function comments(language) {
  if (HASH.has(language)) return "#[^\\n]*";
  if (DASH.has(language)) return "--[^\\n]*";
  if (["html", "xml", "svg"].includes(language)) return "<!--[^]*?(?:-->|$)";
  return "\\/\\/[^\\n]*|\\/\\*[^]*?(?:\\*\\/|$)";
}

/** Strings and spans that joined are the code. */
export function highlight(code, name) {
  const language = name.toLowerCase();
  if (PLAIN.has(language) || code.length > LIMIT) return [code];
  const pattern = new RegExp(`(${comments(language)})|(${STRING})|(${NUMBER})|(${WORD})`, "g");
  const parts = [];
  let done = 0;
  for (const hit of code.matchAll(pattern)) {
    const kind = kindOf(hit, language);
    if (!kind) continue;
    parts.push(code.slice(done, hit.index), h("span", { class: `t-${kind}` }, hit[0]));
    done = hit.index + hit[0].length;
  }
  parts.push(code.slice(done));
  return parts;
}

function kindOf([, comment, string, number, word], language) {
  if (comment) return "comment";
  if (string) return "string";
  if (number) return "number";
  const known = language === "sql" ? SQL.has(word.toLowerCase()) : KEYWORDS.has(word);
  return known ? "keyword" : null;
}
