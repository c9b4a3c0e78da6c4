//! What ranks say and hear: the commands of PMI-1, one a line, as words `name=value`.

use std::fmt;

/// Bytes of the longest key and of the longest value, as the ranks are told.
pub(super) const MAX_KEY_LEN: usize = 64;
pub(super) const MAX_VALUE_LEN: usize = 4096;
/// Bytes of the longest name of a space.
const MOST_NAME: usize = 256;

/// What a rank says.
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
        space: String,
        key: String,
        value: String,
    },
    Get {
        space: String,
        key: String,
    },
    BarrierIn,
    Finalize,
    Abort {
        code: i32,
        message: String,
    },
    /// What no launcher of ours does for a rank; the name of the answer.
    Unserved(&'static str),
}

/// What a rank hears.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Init {
        is_served: bool,
    },
    Maxes,
    Appnum,
    MyKvsname(String),
    UniverseSize(usize),
    Put,
    /// Nothing for a space that is not the rank's.
    NotPut,
    Get(Option<String>),
    BarrierOut,
    Finalize,
    Unserved(&'static str),
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rc = |is_fine: bool| if is_fine { 0 } else { -1 };
        match self {
            Answer::Init { is_served } => {
                write!(f, "cmd=response_to_init rc={} pmi_version=1 pmi_subversion=1", rc(*is_served))
            }
            Answer::Maxes => {
                write!(f, "cmd=maxes rc=0 kvsname_max={MOST_NAME} keylen_max={MAX_KEY_LEN} vallen_max={MAX_VALUE_LEN}")
            }
            Answer::Appnum => f.write_str("cmd=appnum rc=0 appnum=0"),
            Answer::MyKvsname(name) => write!(f, "cmd=my_kvsname rc=0 kvsname={name}"),
            Answer::UniverseSize(size) => write!(f, "cmd=universe_size rc=0 size={size}"),
            Answer::Put => f.write_str("cmd=put_result rc=0 msg=success"),
            Answer::NotPut => f.write_str("cmd=put_result rc=-1 msg=no_such_space"),
            Answer::Get(Some(value)) => write!(f, "cmd=get_result rc=0 msg=success value={value}"),
            Answer::Get(None) => f.write_str("cmd=get_result rc=-1 msg=key_not_found"),
            Answer::BarrierOut => f.write_str("cmd=barrier_out rc=0"),
            Answer::Finalize => f.write_str("cmd=finalize_ack rc=0"),
            Answer::Unserved(name) => write!(f, "cmd={name} rc=-1 msg=not_served_by_fsdp-launch"),
        }
    }
}

/// Reads a rank's lines.
#[derive(Default)]
pub(super) struct Parser {
    /// The answer to a command of several lines that has not ended yet.
    within: Option<&'static str>,
}

impl Parser {
    /// The command that ends with this line, if one does.
    ///
    /// # Errors
    /// What is wrong with the line.
    pub(super) fn line(&mut self, line: &str) -> Result<Option<Command>, String> {
        if let Some(answer) = self.within {
            if line != "endcmd" {
                return Ok(None);
            }
            self.within = None;
            return Ok(Some(Command::Unserved(answer)));
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
    let wanted = |name: &str| word(line, name).ok_or_else(|| format!("{:?}, which lacks {name}=", shortened(line)));
    let key = || match wanted("key")? {
        key if (1..=MAX_KEY_LEN).contains(&key.len()) => Ok(key.to_owned()),
        key => Err(format!("a key of {} bytes: 1 to {MAX_KEY_LEN} are allowed", key.len())),
    };
    Ok(match name {
        "init" => {
            let version = wanted("pmi_version")?;
            Command::Init { version: version.parse().map_err(|_| format!("the version {:?}", shortened(version)))? }
        }
        "get_maxes" => Command::GetMaxes,
        "get_appnum" => Command::GetAppnum,
        "get_my_kvsname" => Command::GetMyKvsname,
        "get_universe_size" => Command::GetUniverseSize,
        "put" => {
            // The last word: it may have spaces.
            let (_, value) =
                line.split_once(" value=").ok_or_else(|| format!("{:?} without value=", shortened(line)))?;
            if value.len() > MAX_VALUE_LEN {
                return Err(format!("a value of {} bytes: {MAX_VALUE_LEN} are allowed", value.len()));
            }
            Command::Put { space: wanted("kvsname")?.to_owned(), key: key()?, value: value.to_owned() }
        }
        "get" => Command::Get { space: wanted("kvsname")?.to_owned(), key: key()? },
        "barrier_in" => Command::BarrierIn,
        "finalize" => Command::Finalize,
        "abort" => {
            let code = word(line, "exitcode").and_then(|code| code.parse().ok()).unwrap_or(1);
            let message = line.split_once(" message=").map_or("", |(_, message)| message);
            Command::Abort { code, message: message.to_owned() }
        }
        "publish_name" => Command::Unserved("publish_result"),
        "unpublish_name" => Command::Unserved("unpublish_result"),
        "lookup_name" => Command::Unserved("lookup_result"),
        _ => return Err(unknown(line)),
    })
}

/// The value of `name=` among the words before a value that may have spaces.
fn word<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let head = line.split_once(" value=").map_or(line, |(head, _)| head);
    head.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
}

fn unknown(line: &str) -> String {
    format!("{:?}, which is no command of PMI-1", shortened(line))
}

fn shortened(text: &str) -> String {
    const SHOWN: usize = 80;
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parsed(line: &str) -> Result<Option<Command>, String> {
        Parser::default().line(line)
    }

    #[test]
    fn what_mpich_says_is_understood() {
        let put = |value: &str| Command::Put { space: "kvs_0".into(), key: "P0".into(), value: value.into() };
        for (line, command) in [
            ("cmd=init pmi_version=1 pmi_subversion=1", Command::Init { version: 1 }),
            ("cmd=get_maxes", Command::GetMaxes),
            ("cmd=put kvsname=kvs_0 key=P0 value=tag#0$c[2]=7", put("tag#0$c[2]=7")),
            ("cmd=put kvsname=kvs_0 key=P0 value=two words key=x", put("two words key=x")),
            ("cmd=put kvsname=kvs_0 key=P0 value=", put("")),
            ("cmd=get kvsname=s key=k", Command::Get { space: "s".into(), key: "k".into() }),
            ("cmd=abort exitcode=13 message=a b", Command::Abort { code: 13, message: "a b".into() }),
            ("cmd=abort", Command::Abort { code: 1, message: String::new() }),
            ("cmd=publish_name service=svc port=port", Command::Unserved("publish_result")),
        ] {
            assert_eq!(parsed(line), Ok(Some(command)), "{line}");
        }
    }

    #[test]
    fn a_command_of_several_lines_is_answered_at_its_end() {
        let mut parser = Parser::default();
        for line in ["mcmd=spawn", "nprocs=1", "cmd=finalize", "preput_val_0=x"] {
            assert_eq!(parser.line(line), Ok(None));
        }
        assert_eq!(parser.line("endcmd"), Ok(Some(Command::Unserved("spawn_result"))));
        assert_eq!(parser.line("cmd=finalize"), Ok(Some(Command::Finalize)));
    }

    #[test]
    fn what_is_wrong_with_a_line_is_told() {
        let long = format!("cmd=get kvsname=s key={}", "k".repeat(MAX_KEY_LEN + 1));
        let much = format!("cmd=put kvsname=s key=k value={}", "v".repeat(MAX_VALUE_LEN + 1));
        for (line, part) in [
            ("", "no command of PMI-1"),
            ("hello world", "\"hello world\", which is no command"),
            ("cmd=dance", "no command"),
            (" cmd=finalize", "no command"),
            ("mcmd=dance", "no command"),
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
        fn any_text_is_a_command_or_an_error(lines in proptest::collection::vec("[ -~]{0,60}", 0..8)) {
            let mut parser = Parser::default();
            lines.iter().for_each(|line| drop(parser.line(line)));
        }

        #[test]
        fn words_in_any_order_are_read_without_a_panic(
            name in "(init|put|get|abort|spawn|finalize|barrier_in)",
            words in proptest::collection::vec("(key|value|kvsname|pmi_version|exitcode|message)=[ -~]{0,9}", 0..6),
        ) {
            drop(parsed(&format!("cmd={name} {}", words.join(" "))));
        }
    }
}
