package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sys/unix"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/proctree"
	"github.com/tenurelib/tenure/internal/testkit"
)

var witnessMeasure = measure{
	name:  "witness",
	about: "a process under a witness is stopped, or killed: until the first instruction of the next one's job",
	named: true,
	run:   measureWitness,
}

// succession is what one process holds until another one has it.
type succession struct {
	name string
	n    int
	env  []string
	args []string // a program with its arguments; default: this one

	graceful, killed, dead []time.Duration
}

func measureWitness(ctx context.Context, b *bench) error {
	peers := []peer{etcdPeer, clientGoPeer} // without a witness, at their defaults
	s, err := b.servers(ctx, peers)
	if err != nil {
		return err
	}
	url := s[onPostgres]
	store, err := tenure.OpenPostgres(ctx, url, tenure.PostgresConfig{})
	if err != nil {
		return err
	}
	defer store.Close()
	if err := errors.Join(store.Migrate(ctx), claims.Migrate(ctx, store)); err != nil {
		return err
	}
	command := filepath.Join(b.files, "tenure")
	build := exec.CommandContext(ctx, "go", "build", "-o", command, ".")
	build.Dir = filepath.Join("..", "..", "cmd", "tenure")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build the command: %w: %s", err, out)
	}
	part := func(name string, n int, part string, amount int) *succession {
		return &succession{name: name, n: n, env: []string{partEnv + "=" + part, urlEnv + "=" + url, fmt.Sprint(amountEnv, "=", amount)}}
	}
	all := []*succession{
		part("16 MiB", 100, "witness resident", 0), // of which it has 16 without
		part("64 MiB", 100, "witness resident", 48),
		part("512 MiB", 40, "witness resident", 496),
		part("40 leases", 40, "witness leases", 40),
		part("100 keys", 40, "witness keys", 100),
		{name: "tenure run", n: 40, args: []string{command, "witness", "--young", "0", "--pass-store", "--store", url, "--",
			command, "run", "--key", "run", "--ttl", longTTL.String(), "--", "sh", "-c", "echo began; exec sleep 1000"}},
		part("advisory lock", 100, "advisory", 0),
	}
	for _, p := range peers {
		all = append(all, &succession{name: p.name, n: 3, env: []string{partEnv + "=" + p.name, urlEnv + "=" + s.url(p)}})
	}
	for _, s := range all {
		if err := s.try(ctx, b.samples(s.n)); err != nil {
			b.failed("witness", s.name, err)
		}
		b.report.addQuantiles("witness", s.name, "stopped", s.graceful)
		b.report.addQuantiles("witness", s.name, "killed", s.killed)
		b.report.addQuantiles("witness", s.name, "from its death", s.dead)
	}
	if err := loseLocks(ctx, b, url); err != nil {
		b.failed("witness", "advisory lock", err)
	}
	return ctx.Err()
}

// try has two processes succeed each other, n times after a kill and as often after a SIGTERM.
func (s *succession) try(ctx context.Context, n int) error {
	var holder, next *player
	var err error
	defer func() {
		for _, p := range []*player{holder, next} {
			if p != nil {
				p.end()
			}
		}
	}()
	if holder, err = s.start(); err == nil {
		_, err = holder.hears(ctx, "began")
	}
	kills, stops := n, n
	for err == nil && kills+stops > 0 {
		if next, err = s.start(); err != nil {
			return err
		}
		if s.args == nil {
			_, err = next.hears(ctx, "stands by")
		}
		if err = errors.Join(err, pause(ctx, 400*time.Millisecond+rand.N(100*time.Millisecond))); err != nil {
			return err
		}
		kill := rand.N(kills+stops) < kills
		victims, pid := holder.victims()
		death := awaitDeath(pid)
		from := time.Now()
		if kill {
			kills--
			for _, pid := range victims {
				syscall.Kill(pid, syscall.SIGKILL)
			}
		} else {
			stops--
			holder.Process.Signal(syscall.SIGTERM)
		}
		var at time.Time
		if at, err = next.hears(ctx, "began"); err != nil {
			return err
		}
		if kill {
			s.killed = append(s.killed, at.Sub(from))
			s.dead = append(s.dead, at.Sub(<-death))
		} else {
			s.graceful = append(s.graceful, at.Sub(from))
		}
		holder.end()
		holder, next = next, nil
	}
	return err
}

// player is a process that holds something or stands by.
type player struct {
	*exec.Cmd
	said  chan string
	alone bool // it has no witness
}

func (s *succession) start() (*player, error) {
	args := s.args
	if args == nil {
		args = []string{"/proc/self/exe"}
	}
	p := &player{Cmd: exec.Command(args[0], args[1:]...), said: make(chan string, 100)}
	p.alone = s.args == nil && !strings.Contains(s.env[0], "witness ")
	p.Env = append(os.Environ(), s.env...)
	out, err := p.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(p.said)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			p.said <- lines.Text()
		}
	}()
	return p, nil
}

// hears waits for a line that begins with a word, and returns the time in it, or that of its arrival.
func (p *player) hears(ctx context.Context, word string) (time.Time, error) {
	limit := time.After(3 * time.Minute) // the TTL of etcd's sessions is one
	for {
		select {
		case line, ok := <-p.said:
			if !ok {
				return time.Time{}, errors.New("a process has ended")
			}
			if rest, ok := strings.CutPrefix(line, word); ok {
				at, err := strconv.ParseInt(strings.TrimSpace(rest), 10, 64)
				if err != nil {
					return time.Now(), nil
				}
				return time.Unix(0, at), nil
			}
		case <-limit:
			return time.Time{}, fmt.Errorf("a process has not said %q in time", word)
		case <-ctx.Done():
			return time.Time{}, ctx.Err()
		}
	}
}

// victims returns the processes to kill, and the one whose death counts.
func (p *player) victims() (all []int, counts int) {
	if p.alone {
		return []int{p.Process.Pid}, p.Process.Pid
	}
	for _, d := range proctree.Descendants(p.Process.Pid) {
		all = append(all, d.PID)
		if d.Parent == p.Process.Pid {
			counts = d.PID
		}
	}
	return all, counts
}

func (p *player) end() {
	_ = p.Process.Signal(syscall.SIGTERM)
	late := time.AfterFunc(10*time.Second, func() { p.Process.Kill() })
	defer late.Stop()
	for range p.said {
	}
	_ = p.Wait()
}

// awaitDeath receives when the kernel says that a process is dead, to whoever waits for it.
func awaitDeath(pid int) <-chan time.Time {
	died := make(chan time.Time, 1)
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		died <- time.Now()
		return died
	}
	go func() {
		defer unix.Close(fd)
		for err = unix.EINTR; err == unix.EINTR; {
			_, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
		}
		died <- time.Now()
	}()
	return died
}

// livesOn returns how long after now the process with the second URL has the lock of the one with the first, which lives.
func livesOn(ctx context.Context, of, others string, now func() error) (time.Duration, error) {
	holder, err := advisory(of).start()
	if err != nil {
		return 0, err
	}
	defer holder.end()
	if _, err := holder.hears(ctx, "began"); err != nil {
		return 0, err
	}
	next, err := advisory(others).start()
	if err != nil {
		return 0, err
	}
	defer next.end()
	from, err := next.hears(ctx, "stands by")
	if now != nil && err == nil {
		err = pause(ctx, 200*time.Millisecond)
		from = time.Now()
		err = errors.Join(err, now())
	}
	if err != nil {
		return 0, err
	}
	at, err := next.hears(ctx, "began")
	if err == nil && syscall.Kill(holder.Process.Pid, 0) != nil {
		err = errors.New("the holder has ended")
	}
	return at.Sub(from), err
}

func advisory(url string) *succession {
	return &succession{env: []string{partEnv + "=advisory", urlEnv + "=" + url}}
}

// loseLocks has an advisory lock released for a process that lives, in three ways.
func loseLocks(ctx context.Context, b *bench, url string) error {
	proxy, through, err := newProxy(url, nil)
	if err != nil {
		return err
	}
	defer proxy.Close()
	bouncer, err := testkit.NewBouncer(url, "pool_mode = transaction", "default_pool_size = 1")
	if err != nil {
		return err
	}
	defer bouncer.Close()
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	for _, way := range []struct {
		what, of, others string
		now              func() error
	}{
		{"pg_terminate_backend", url, url, func() error {
			_, err := conn.Exec(ctx, `SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted`)
			return err
		}},
		{"its connection is cut", through, url, func() error { proxy.Cut(); return nil }},
		{"a pooler in transaction mode", bouncer.URL, bouncer.URL, nil},
	} {
		after, err := livesOn(ctx, way.of, way.others, way.now)
		if err != nil {
			return fmt.Errorf("%s: %w", way.what, err)
		}
		b.report.note("witness", "advisory lock", fmt.Sprintf("%s: another process works after %v, and so does the former holder", way.what, after.Round(100*time.Microsecond)))
	}
	return nil
}
