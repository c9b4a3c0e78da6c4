//! Commands and responses of PMI-1: one a line, as words `name=value`.

use std::{fmt, io::BufRead};

/// Maximum lengths of a key and of a value, as `get_maxes` returns them.
pub(super) const MAX_KEY_LEN: usize = 64;
pub(super) const MAX_VALUE_LEN: usize = 4096;
/// Maximum length of a KVS name.
const MAX_NAME_LEN: usize = 256;

/// A command of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Command {
    Init {
        version: u32,
    },
    GetMaxes,
    GetAppnum,
    GetMyKvsname,
    GetUniverseSize,
    Put {
        kvs: String,
        key: String,
        value: String,
    },
    Get {
        kvs: String,
        key: String,
    },
    BarrierIn,
    Finalize,
    Abort {
        code: i32,
        message: String,
    },
    /// A command that this launcher does not support; the name of its response.
    Unsupported(&'static str),
}

/// A response to a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Response {
    Init {
        is_served: bool,
    },
    Maxes,
    Appnum,
    MyKvsname(String),
    UniverseSize(usize),
    Put,
    /// The KVS is not the rank's.
    NotPut,
    Get(Option<String>),
    BarrierOut,
    Finalize,
    Unsupported(&'static str),
}

impl fmt::Display for Response {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rc = |is_fine: bool| if is_fine { 0 } else { -1 };
        match self {
            Response::Init { is_served } => {
                write!(f, "cmd=response_to_init rc={} pmi_version=1 pmi_subversion=1", rc(*is_served))
            }
            Response::Maxes => {
                write!(
                    f,
                    "cmd=maxes rc=0 kvsname_max={MAX_NAME_LEN} keylen_max={MAX_KEY_LEN} vallen_max={MAX_VALUE_LEN}"
                )
            }
            Response::Appnum => f.write_str("cmd=appnum rc=0 appnum=0"),
            Response::MyKvsname(name) => write!(f, "cmd=my_kvsname rc=0 kvsname={name}"),
            Response::UniverseSize(size) => write!(f, "cmd=universe_size rc=0 size={size}"),
            Response::Put => f.write_str("cmd=put_result rc=0 msg=success"),
            Response::NotPut => f.write_str("cmd=put_result rc=-1 msg=no_such_space"),
            Response::Get(Some(value)) => write!(f, "cmd=get_result rc=0 msg=success value={value}"),
            Response::Get(None) => f.write_str("cmd=get_result rc=-1 msg=key_not_found"),
            Response::BarrierOut => f.write_str("cmd=barrier_out rc=0"),
            Response::Finalize => f.write_str("cmd=finalize_ack rc=0"),
            Response::Unsupported(name) => write!(f, "cmd={name} rc=-1 msg=not_served_by_fsdp-launch"),
        }
    }
}

/// Parses a rank's lines.
#[derive(Default)]
pub(super) struct Parser {
    /// Response to an incomplete command of several lines.
    within: Option<&'static str>,
}

impl Parser {
    /// Returns the command that ends with this line, if any, or describes an invalid line.
    pub(super) fn line(&mut self, line: &str) -> Result<Option<Command>, String> {
        if let Some(answer) = self.within {
            if line != "endcmd" {
                return Ok(None);
            }
            self.within = None;
            return Ok(Some(Command::Unsupported(answer)));
        }
        if let Some(name) = line.strip_prefix("mcmd=") {
            self.within = Some(match name.split(' ').next() {
                Some("spawn") => "spawn_result",
                _ => return Err(unknown(line)),
            });
            return Ok(None);
        }
        command(line).map(Some)
    }
}

fn command(line: &str) -> Result<Command, String> {
    let name = word(line, "cmd").filter(|_| line.starts_with("cmd=")).ok_or_else(|| unknown(line))?;
    let wanted = |name: &str| word(line, name).ok_or_else(|| format!("{:?}, which lacks {name}=", truncated(line)));
    let key = || match wanted("key")? {
        key if (1..=MAX_KEY_LEN).contains(&key.len()) => Ok(key.to_owned()),
        key => Err(format!("a key of {} bytes: 1 to {MAX_KEY_LEN} are allowed", key.len())),
    };
    Ok(match name {
        "init" => {
            let version = wanted("pmi_version")?;
            Command::Init { version: version.parse().map_err(|_| format!("the version {:?}", truncated(version)))? }
        }
        "get_maxes" => Command::GetMaxes,
        "get_appnum" => Command::GetAppnum,
        "get_my_kvsname" => Command::GetMyKvsname,
        "get_universe_size" => Command::GetUniverseSize,
        "put" => {
            // The value is the last word and may contain spaces.
            let (_, value) =
                line.split_once(" value=").ok_or_else(|| format!("{:?} without value=", truncated(line)))?;
            if value.len() > MAX_VALUE_LEN {
                return Err(format!("a value of {} bytes: {MAX_VALUE_LEN} are allowed", value.len()));
            }
            Command::Put { kvs: wanted("kvsname")?.to_owned(), key: key()?, value: value.to_owned() }
        }
        "get" => Command::Get { kvs: wanted("kvsname")?.to_owned(), key: key()? },
        "barrier_in" => Command::BarrierIn,
        "finalize" => Command::Finalize,
        "abort" => {
            let code = word(line, "exitcode").and_then(|code| code.parse().ok()).unwrap_or(1);
            let message = line.split_once(" message=").map_or("", |(_, message)| message);
            Command::Abort { code, message: message.to_owned() }
        }
        "publish_name" => Command::Unsupported("publish_result"),
        "unpublish_name" => Command::Unsupported("unpublish_result"),
        "lookup_name" => Command::Unsupported("lookup_result"),
        _ => return Err(unknown(line)),
    })
}

/// Returns the value of `name=` among the words before `value=`.
fn word<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let head = line.split_once(" value=").map_or(line, |(head, _)| head);
    head.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
}

fn unknown(line: &str) -> String {
    format!("{:?}, which is not a command of PMI-1", truncated(line))
}

fn truncated(text: &str) -> String {
    const SHOWN: usize = 80;
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

/// Maximum length of a line.
pub(super) const MAX_LINE_LEN: usize = 16 << 10;

/// Reads a line. Returns `None` at the end of the connection, also within a line, and an error with a description of
/// the input if it is too long or not printable ASCII.
pub(super) fn read_line(input: impl BufRead) -> Result<Option<String>, String> {
    let mut line = Vec::new();
    let read = input.take(MAX_LINE_LEN as u64 + 1).read_until(b'\n', &mut line);
    // A rank that ends with unread responses resets the connection.
    if read.is_err() || (line.last() != Some(&b'\n') && line.len() <= MAX_LINE_LEN) {
        return Ok(None);
    }
    if line.pop() != Some(b'\n') {
        return Err(format!("a line of more than {MAX_LINE_LEN} bytes"));
    }
    if let Some(byte) = line.iter().find(|byte| !(b' '..=b'~').contains(byte)) {
        return Err(format!("a line with the byte {byte:#04x}"));
    }
    String::from_utf8(line).map(Some).map_err(|_| "a line that is not text".into())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parsed(line: &str) -> Result<Option<Command>, String> {
        Parser::default().line(line)
    }

    #[test]
    fn parses_mpichs_commands() {
        let put = |value: &str| Command::Put { kvs: "kvs_0".into(), key: "P0".into(), value: value.into() };
        for (line, command) in [
            ("cmd=init pmi_version=1 pmi_subversion=1", Command::Init { version: 1 }),
            ("cmd=get_maxes", Command::GetMaxes),
            ("cmd=put kvsname=kvs_0 key=P0 value=tag#0$c[2]=7", put("tag#0$c[2]=7")),
            ("cmd=put kvsname=kvs_0 key=P0 value=two words key=x", put("two words key=x")),
            ("cmd=put kvsname=kvs_0 key=P0 value=", put("")),
            ("cmd=get kvsname=s key=k", Command::Get { kvs: "s".into(), key: "k".into() }),
            ("cmd=abort exitcode=13 message=a b", Command::Abort { code: 13, message: "a b".into() }),
            ("cmd=abort", Command::Abort { code: 1, message: String::new() }),
            ("cmd=publish_name service=svc port=port", Command::Unsupported("publish_result")),
        ] {
            assert_eq!(parsed(line), Ok(Some(command)), "{line}");
        }
    }

    #[test]
    fn a_command_of_several_lines_ends_with_endcmd() {
        let mut parser = Parser::default();
        for line in ["mcmd=spawn", "nprocs=1", "cmd=finalize", "preput_val_0=x"] {
            assert_eq!(parser.line(line), Ok(None));
        }
        assert_eq!(parser.line("endcmd"), Ok(Some(Command::Unsupported("spawn_result"))));
        assert_eq!(parser.line("cmd=finalize"), Ok(Some(Command::Finalize)));
    }

    #[test]
    fn errors_describe_the_line() {
        let long = format!("cmd=get kvsname=s key={}", "k".repeat(MAX_KEY_LEN + 1));
        let much = format!("cmd=put kvsname=s key=k value={}", "v".repeat(MAX_VALUE_LEN + 1));
        for (line, part) in [
            ("", "not a command of PMI-1"),
            ("hello world", "\"hello world\", which is not a command"),
            ("cmd=dance", "not a command"),
            (" cmd=finalize", "not a command"),
            ("mcmd=dance", "not a command"),
            ("cmd=init", "lacks pmi_version="),
            ("cmd=init pmi_version=one", "version \"one\""),
            ("cmd=put kvsname=s key=k", "without value="),
            ("cmd=put key=k value=v", "lacks kvsname="),
            ("cmd=get kvsname=s key=", "a key of 0 bytes"),
            (&long, "a key of 65 bytes"),
            (&much, "a value of 4097 bytes"),
        ] {
            let error = parsed(line).unwrap_err();
            assert!(error.contains(part), "{line}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_parses_or_fails(lines in proptest::collection::vec("[ -~]{0,60}", 0..8)) {
            let mut parser = Parser::default();
            lines.iter().for_each(|line| drop(parser.line(line)));
        }

        #[test]
        fn words_in_any_order_do_not_panic(
            name in "(init|put|get|abort|spawn|finalize|barrier_in)",
            words in proptest::collection::vec("(key|value|kvsname|pmi_version|exitcode|message)=[ -~]{0,9}", 0..6),
        ) {
            drop(parsed(&format!("cmd={name} {}", words.join(" "))));
        }
    }

    #[test]
    fn reads_lines_of_limited_length() {
        let mut input = &b"cmd=init\n\ncmd=b\ncmd"[..];
        let mut read = || read_line(&mut input).unwrap();
        assert_eq!([read(), read()], [Some("cmd=init".into()), Some(String::new())]);
        assert_eq!([read(), read(), read()], [Some("cmd=b".into()), None, None]);
        let whole = [vec![b'x'; MAX_LINE_LEN], vec![b'\n']].concat();
        assert_eq!(read_line(&mut &whole[..]).unwrap().unwrap().len(), MAX_LINE_LEN);
        let long = vec![b'x'; MAX_LINE_LEN + 1];
        assert!(read_line(&mut &long[..]).unwrap_err().contains("more than 16384 bytes"));
        assert!(read_line(&mut &b"a\x00b\n"[..]).unwrap_err().contains("0x00"));
        assert!(read_line(&mut &[0xff, b'\n'][..]).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_lines_or_fail(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let mut input = &bytes[..];
            while let Ok(Some(line)) = read_line(&mut input) {
                prop_assert!(line.bytes().all(|byte| byte >= b' '));
            }
        }
    }
}
