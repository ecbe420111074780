// Command shards shows 64 shards move between real processes, which are started, stopped and
// killed. It prints who worked for which shard over time, and exits with 0 only if no shard
// ever had two owners and each had one at the end.
//
//	go run ./examples/shards [-store postgres://…] [-svg shards.svg]
//
// Without -store the processes share a SQLite file, where a process is not woken when another
// frees a shard, and finds it by polling.
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
	"sync"
	"syscall"
	"time"

	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/shards"
)

const (
	count  = 64
	ttl    = 3 * time.Second
	settle = 500 * time.Millisecond
)

func main() {
	replica := flag.String("replica", "", "be the process of this name")
	store := flag.String("store", "", "the URL of the database; default: a SQLite file that is removed")
	svg := flag.String("svg", "", "write a plot to this file, too")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	if *replica != "" {
		err = work(ctx, *store, *replica)
	} else {
		err = conduct(ctx, *store, *svg, os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "shards:", err)
		os.Exit(1)
	}
}

// work is one of the processes. It prints a line when it begins to work for a shard, and when
// it has ended.
func work(ctx context.Context, url, name string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() { // so that it does not outlive its parent
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
	store, err := tenure.Open(ctx, url)
	if err != nil {
		return err
	}
	defer store.Close()
	if err := store.Migrate(ctx); err != nil {
		return err
	}
	session, err := claims.NewSession(store, claims.SessionConfig{TTL: ttl, Holder: name, Logger: quiet})
	if err != nil {
		return err
	}
	var mu sync.Mutex
	say := func(what, id string) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Println(what, id, time.Now().UnixNano()) // its reader may be late
	}
	jobs, err := shards.New(session, shards.Config{
		Kind: "job", Count: count, Settle: settle,
		Run: func(ctx context.Context, id string) error {
			say("begin", id)
			<-ctx.Done()
			say("end", id)
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

// conduct starts the processes, stops some and kills one.
func conduct(ctx context.Context, url, svg string, out io.Writer) error {
	if url == "" {
		dir, err := os.MkdirTemp("", "shards")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		url = "sqlite:" + filepath.Join(dir, "shards.db")
	}
	p := newPlot()
	running := map[string]*process{}
	defer func() {
		for _, r := range running {
			r.end(syscall.SIGKILL)
		}
	}()
	start := func(name string) error {
		r, err := p.start(url, name)
		if err == nil {
			running[name] = r
		}
		return err
	}
	end := func(name string, signal os.Signal) error {
		running[name].end(signal)
		delete(running, name)
		return nil
	}
	for _, step := range []struct {
		what string
		do   func() error
		wait time.Duration
	}{
		{"A, B and C start", func() error { return errors.Join(start("A"), start("B"), start("C")) }, 4 * time.Second},
		{"D joins", func() error { return start("D") }, 3 * time.Second},
		{"E and F join", func() error { return errors.Join(start("E"), start("F")) }, 3 * time.Second},
		{"B is stopped", func() error { return end("B", syscall.SIGTERM) }, 2 * time.Second},
		{"D is killed", func() error { return end("D", syscall.SIGKILL) }, ttl + 2*time.Second},
		{"G joins", func() error { return start("G") }, 3 * time.Second},
	} {
		fmt.Fprintf(out, "%5.1fs  %s\n", p.at(), step.what)
		p.mark(step.what)
		if err := step.do(); err != nil {
			return err
		}
		select {
		case <-time.After(step.wait):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	err := p.judge()
	p.text(out)
	if svg == "" {
		return err
	}
	return errors.Join(err, os.WriteFile(svg, p.svg(), 0o644))
}

// process is one that this program has started.
type process struct {
	name  string
	cmd   *exec.Cmd
	stdin io.Closer
	ended chan struct{}
}

func (p *plot) start(url, name string) (*process, error) {
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
	r := &process{name: name, cmd: cmd, stdin: stdin, ended: make(chan struct{})}
	go func() {
		defer close(r.ended)
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			var what, id string
			var at int64
			if _, err := fmt.Sscan(lines.Text(), &what, &id, &at); err == nil {
				p.note(name, what, id, time.Unix(0, at))
			}
		}
		p.gone(name)
		_ = cmd.Wait() // it says so if it was killed
	}()
	return r, nil
}

// end lets a process end, and waits for it.
func (r *process) end(signal os.Signal) {
	_ = r.cmd.Process.Signal(signal)
	<-r.ended
	_ = r.stdin.Close()
}
