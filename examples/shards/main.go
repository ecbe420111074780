// Command shards shows 24 shards move between real processes, which are started, stopped and
// killed. It prints which process worked for which shard over time, and exits with 0 only if
// no shard ever had two owners and each has one at the end.
//
//	go run ./examples/shards [-store postgres://…]
//
// Without -store the processes share a temporary SQLite file, where no process is woken when
// another frees a shard: it finds the shard by polling.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/shards"
)

const (
	count  = 24
	ttl    = 3 * time.Second
	settle = 500 * time.Millisecond
)

func main() {
	replica := flag.String("replica", "", "be the process of this name")
	store := flag.String("store", "", "the URL of the database; default: a temporary SQLite file")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	if *replica != "" {
		err = work(ctx, *store, *replica)
	} else {
		err = conduct(ctx, *store, os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "shards:", err)
		os.Exit(1)
	}
}

// work is one of the processes, and the part of this program that a service would have. It
// prints a line when it begins to work for a shard, and one when it has ended.
func work(ctx context.Context, url, name string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() { // ends the process when its parent is gone
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	store, err := tenure.Open(ctx, url)
	if err != nil {
		return err
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil {
		return err
	}
	if err := claims.Migrate(ctx, store); err != nil {
		return err
	}
	quiet := slog.New(slog.DiscardHandler)
	session, err := claims.NewSession(store, claims.SessionConfig{TTL: ttl, Holder: name, Logger: quiet})
	if err != nil {
		return err
	}
	jobs, err := shards.New(session, shards.Config{
		Kind: "job", Count: count, Settle: settle,
		Work: func(ctx context.Context, id string) error {
			fmt.Println(id, name, time.Now().UnixNano()) // the time, because the reader may be late
			<-ctx.Done()
			fmt.Println(id, nobody, time.Now().UnixNano())
			return nil
		},
	})
	if err != nil {
		return err
	}
	var running sync.WaitGroup
	var errs [2]error
	running.Go(func() { errs[0] = session.Run(ctx) })
	running.Go(func() { errs[1] = jobs.Run(ctx) })
	running.Wait()
	return errors.Join(errs[:]...)
}

// conduct starts the processes, stops one and kills one.
func conduct(ctx context.Context, url string, out io.Writer) error {
	if url == "" {
		dir, err := os.MkdirTemp("", "shards")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		url = "sqlite:" + filepath.Join(dir, "shards.db?shared=true")
	}
	t := &timeline{began: time.Now()}
	running := map[string]*process{}
	defer func() {
		for _, p := range running {
			p.end(syscall.SIGKILL)
		}
	}()
	for _, step := range []struct {
		what  string
		names []string
		end   os.Signal // nil: they start
		wait  time.Duration
	}{
		{"A, B and C start", []string{"A", "B", "C"}, nil, 4 * time.Second},
		{"D joins", []string{"D"}, nil, 3 * time.Second},
		{"E and F join", []string{"E", "F"}, nil, 3 * time.Second},
		{"B is stopped", []string{"B"}, syscall.SIGTERM, 2 * time.Second},
		{"D is killed", []string{"D"}, syscall.SIGKILL, ttl + 2*time.Second},
		{"G joins", []string{"G"}, nil, 3 * time.Second},
	} {
		fmt.Fprintf(out, "%5.1fs  %s\n", time.Since(t.began).Seconds(), step.what)
		for _, name := range step.names {
			if step.end != nil {
				running[name].end(step.end)
				delete(running, name)
				continue
			}
			p, err := start(t, url, name)
			if err != nil {
				return err
			}
			running[name] = p
		}
		select {
		case <-time.After(step.wait):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	lines, err := t.lines()
	for limit := time.Now().Add(time.Minute); errors.Is(err, errUnowned) && ctx.Err() == nil && time.Now().Before(limit); lines, err = t.lines() {
		time.Sleep(time.Second / 4) // a busy machine takes longer
	}
	for shard, line := range lines {
		fmt.Fprintf(out, "%2d %s\n", shard, line)
	}
	return err
}

// process is one that this program has started.
type process struct {
	cmd   *exec.Cmd
	stdin io.Closer
	ended chan struct{}
}

func start(t *timeline, url, name string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, "-replica", name, "-store", url)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &process{cmd: cmd, stdin: stdin, ended: make(chan struct{})}
	go func() {
		defer close(p.ended)
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			var shard int
			var owner string
			var at int64
			if _, err := fmt.Sscan(lines.Text(), &shard, &owner, &at); err == nil {
				t.note(event{time.Unix(0, at), shard, owner, name})
			}
		}
		for shard := range count {
			t.note(event{time.Now(), shard, nobody, name})
		}
		_ = cmd.Wait() // an error if it was killed
	}()
	return p, nil
}

// end sends the process a signal and waits for its end.
func (p *process) end(signal os.Signal) {
	_ = p.cmd.Process.Signal(signal)
	<-p.ended
	_ = p.stdin.Close()
}

// nobody is the owner of a free shard.
const nobody = "."

// event is a change of a shard's owner, by a process's own account.
type event struct {
	at    time.Time
	shard int
	owner string // the process or nobody
	by    string // the process
}

type timeline struct {
	began time.Time

	mu     sync.Mutex
	events []event
}

func (t *timeline) note(e event) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.events = append(t.events, e)
}

var errUnowned = errors.New("a shard has no owner")

// lines returns a line for each shard, with its owner every quarter of a second. The error says
// whether a shard had two owners, or has none now.
func (t *timeline) lines() (lines []string, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	slices.SortStableFunc(t.events, func(a, b event) int { return a.at.Compare(b.at) })
	owners, lines := slices.Repeat([]string{nobody}, count), make([]string, count)
	next := t.began
	draw := func(until time.Time) {
		for ; next.Before(until); next = next.Add(time.Second / 4) {
			for shard, owner := range owners {
				lines[shard] += owner
			}
		}
	}
	for _, e := range t.events {
		draw(e.at)
		switch owner := owners[e.shard]; {
		case e.owner == nobody && owner != e.by:
			continue // it had ended before
		case e.owner != nobody && owner != nobody:
			err = errors.Join(err, fmt.Errorf("shard %d had two owners: %s began while %s worked for it", e.shard, e.by, owner))
		}
		owners[e.shard] = e.owner
	}
	draw(time.Now())
	if shard := slices.Index(owners, nobody); shard >= 0 {
		err = errors.Join(err, fmt.Errorf("%w: %d", errUnowned, shard))
	}
	return lines, err
}
