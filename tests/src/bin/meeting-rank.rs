//! A rank for tests with several hosts. It meets all others at `MASTER_ADDR:MASTER_PORT`, prints their ranks, and waits
//! until a file exists.
//!
//! `meeting-rank FILE`

use std::{
    io::{BufRead, BufReader, Error, Result, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    thread::sleep,
    time::{Duration, Instant},
};

use fsdp_core::RankEnv;

/// Much longer than the meeting takes.
const LIMIT: Duration = Duration::from_secs(30);

fn main() -> Result<()> {
    let env = RankEnv::from_env().map_err(Error::other)?;
    let met = if env.rank == 0 { gather(&env)? } else { join(&env)? };
    let group = std::env::var("GROUP_RANK").unwrap_or_default();
    println!(
        "rank {} local {}/{} node {group} of {} hosts met {} at {} attempt {}",
        env.rank,
        env.local_rank,
        env.local_world_size,
        env.hosts,
        met.trim(),
        env.master_addr,
        env.attempt
    );
    let file = std::env::args().nth(1).ok_or_else(|| Error::other("usage: meeting-rank FILE"))?;
    while !Path::new(&file).exists() {
        sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Rank 0 receives every rank's number and sends the list to all.
fn gather(env: &RankEnv) -> Result<String> {
    let listener = TcpListener::bind((env.master_addr.as_str(), env.master_port))?;
    let mut met = vec![(0, None)];
    while met.len() < env.world_size {
        let mut stream = listener.accept()?.0;
        stream.set_read_timeout(Some(LIMIT))?;
        let rank: usize = line(&mut stream)?.trim().parse().map_err(Error::other)?;
        met.push((rank, Some(stream)));
    }
    met.sort_by_key(|(rank, _)| *rank);
    let text = met.iter().map(|(rank, _)| rank.to_string()).collect::<Vec<_>>().join(",");
    for mut stream in met.into_iter().filter_map(|(_, stream)| stream) {
        writeln!(stream, "{text}")?;
    }
    Ok(text)
}

fn join(env: &RankEnv) -> Result<String> {
    let began = Instant::now();
    let mut stream = loop {
        match TcpStream::connect((env.master_addr.as_str(), env.master_port)) {
            Ok(stream) => break stream,
            Err(error) if began.elapsed() > LIMIT => return Err(error),
            Err(_) => sleep(Duration::from_millis(20)),
        }
    };
    stream.set_read_timeout(Some(LIMIT))?;
    writeln!(stream, "{}", env.rank)?;
    line(&mut stream)
}

fn line(stream: &mut TcpStream) -> Result<String> {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    Ok(line)
}
