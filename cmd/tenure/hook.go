//go:build unix

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/pace"
	leaserecord "github.com/tenurelib/tenure/internal/record"
)

// check runs --check for the coordinator. checkStandby gives way to it, so that it delays no takeover.
func (r *runner) check(ctx context.Context, role tenure.Role) error {
	if cancel := r.giveWay.Load(); cancel != nil {
		(*cancel)()
	}
	r.checking.Lock()
	defer r.checking.Unlock()
	if role != tenure.RoleHolder || r.fencing.Load() { // then there is no program to check
		return r.runCheck(ctx, "standby")
	}
	return r.runCheck(ctx, "active")
}

func (r *runner) runCheck(ctx context.Context, arg string) error {
	began := time.Now()
	err := runHook(ctx, r.opts.check, []string{arg}, environ(), nil)
	end, _ := ctx.Deadline()
	took, limit := time.Since(began), end.Sub(began)
	said := r.slowCheck.Load()
	if took > limit/2 && (said == nil || began.Sub(*said) > longRepeat) && r.slowCheck.CompareAndSwap(said, &began) {
		r.log.Warn("--check has used more than half of its time", "took", took.Round(time.Millisecond), "limit", limit.Round(time.Millisecond))
	}
	return err
}

// longRepeat is the time between two lines about a state that lasts.
const longRepeat = 10 * time.Minute

// checkStandby runs --check as often as a holder does, so that people learn that this host is not fit before it is needed.
func (r *runner) checkStandby(ctx context.Context) error {
	if r.coordinator.Status().Role != tenure.RoleStandby || !r.checking.TryLock() {
		return nil
	}
	defer r.checking.Unlock()
	ctx, cancel := context.WithTimeout(ctx, r.coordinator.Config().CheckTimeout)
	defer cancel()
	r.giveWay.Store(&cancel)
	defer r.giveWay.Store(nil)
	err := r.runCheck(ctx, "standby")
	if errors.Is(ctx.Err(), context.Canceled) {
		return nil
	}
	return err
}

// fence runs --fence for a host that has vanished. The job does so for the --peers.
func (r *runner) fence(ctx context.Context, prev tenure.Holding) error {
	term := tenure.TermFromContext(ctx)
	// A host that has restarted must not cut off its own power.
	if prev.Holder == r.opts.replica {
		r.log.Info("not fencing an earlier run of this replica", "predecessor", prev.Holder)
		return nil
	}
	// First, because the fence of a former holder may keep this host from fencing others.
	if err := r.unfence(ctx); err != nil {
		if term.Valid() { // otherwise it ends for a reason of its own
			r.coordinator.Resign(ctx) // it must not be retried as --fence is
		}
		return err
	}
	if isUnknown(prev) && len(r.peers()) > 0 { // it is one of them
		return nil
	}
	r.log.Info("fencing", "predecessor", printable(prev.Holder))
	if err := runForTerm(ctx, r.opts.fence,
		environVar("TENURE_PREDECESSOR", prev.Holder), environVar("TENURE_PREDECESSOR_TERM", prev.Term)); err != nil {
		return err
	}
	r.hasFenced(term, prev.Holder)
	return nil
}

// hasFenced notes that a host was fenced in a term.
func (r *runner) hasFenced(term *tenure.Term, host string) {
	if r.fencedIn != term.ID() {
		r.fencedIn, r.fenced = term.ID(), nil
	}
	r.fenced = append(r.fenced, host)
}

// isUnknown reports whether a failover has lost the record of a holder: see [tenure.CoordinatorConfig.FencePredecessor].
func isUnknown(prev tenure.Holding) bool {
	return prev.Holder == leaserecord.Unknown && prev.Term == ""
}

// peers returns the --peers but this replica.
func (r *runner) peers() []string { return without(r.opts.peerNames(), r.opts.replica) }

func without(names []string, but ...string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool { return slices.Contains(but, name) })
}

// fencePeers runs --fence for each of the --peers before the program starts, in each term, however the last one has ended: a
// peer that nobody has heard of could work beside the program, and so could what it has left on a host that released the lease.
func (r *runner) fencePeers(ctx context.Context) error {
	r.fencing.Store(true)
	defer r.fencing.Store(false)
	term, peers := tenure.TermFromContext(ctx), r.peers()
	fencing, cancel := context.WithTimeout(ctx, 10*r.opts.ttl) // as a coordinator does
	defer cancel()
	for began, failures := time.Now(), 0; ; failures++ {
		if r.fencedIn == term.ID() {
			peers = without(peers, r.fenced...)
		}
		if len(peers) > 0 {
			r.log.Info("fencing", "peers", printable(strings.Join(peers, ",")))
		}
		fenced, err := r.fenceAll(fencing, peers)
		for _, peer := range fenced {
			r.hasFenced(term, peer)
		}
		if err == nil {
			return nil
		}
		if time.Since(began) >= r.opts.ttl || !pace.Sleep(fencing, pace.Retry(r.opts.ttl/10, r.opts.ttl/3, failures)) {
			if ctx.Err() == nil && !errors.Is(err, errTermOver) {
				r.log.Error("failed to fence the peers; giving up the lease", "error", err)
			}
			return fmt.Errorf("--fence: %w", err)
		}
		if failures == 0 {
			r.log.Warn("failed to fence the peers; retrying", "error", err)
		}
	}
}

// fenceAll runs --fence for each of some peers, and returns those for which it has succeeded.
func (r *runner) fenceAll(ctx context.Context, peers []string) (fenced []string, err error) {
	for _, peer := range peers {
		if failed := runForTerm(ctx, r.opts.fence, environVar("TENURE_PREDECESSOR", peer)); failed != nil {
			err = errors.Join(err, fmt.Errorf("peer %s: %w", printable(peer), failed))
		} else {
			fenced = append(fenced, peer)
		}
	}
	return fenced, err
}

// unfence runs --unfence, if there is one, once in a term.
func (r *runner) unfence(ctx context.Context) error {
	id := tenure.TermFromContext(ctx).ID()
	if r.opts.unfence == "" || r.unfenced == id {
		return nil
	}
	r.log.Info("unfencing this replica")
	err := r.unfenceAgain(ctx)
	if err == nil {
		r.unfenced = id
	}
	return err
}

func (r *runner) unfenceAgain(ctx context.Context) error {
	// A command that hangs must not keep the lease from a replica that could run the program.
	unfencing, cancel := context.WithTimeoutCause(ctx, r.opts.ttl, fmt.Errorf("it has not returned within %v", r.opts.ttl))
	defer cancel()
	if err := runForTerm(unfencing, r.opts.unfence); err != nil {
		if ctx.Err() == nil && !errors.Is(err, errTermOver) {
			r.log.Error("failed to unfence this replica; giving up the lease", "error", err)
		}
		return fmt.Errorf("--unfence: %w", err)
	}
	return nil
}

// assert runs --unfence and --fence again and again until ctx is done. It ends the term if an
// --unfence fails.
func (r *runner) assert(ctx context.Context, end context.CancelCauseFunc) (wait func()) {
	var asserting sync.WaitGroup
	if r.opts.unfenceEvery > 0 {
		asserting.Go(func() {
			r.repeat(ctx, r.opts.unfenceEvery, "", func() error {
				if err := r.unfenceAgain(ctx); err != nil && !errors.Is(err, errTermOver) {
					end(err)
				}
				return nil
			})
		})
	}
	if r.opts.fenceEvery > 0 {
		asserting.Go(func() {
			r.repeat(ctx, r.opts.fenceEvery, "failed to fence again", func() error {
				ctx, cancel := context.WithTimeout(ctx, 10*r.opts.ttl) // as a coordinator does
				defer cancel()
				_, err := r.fenceAll(ctx, r.peers())
				return err
			})
		})
	}
	return asserting.Wait
}

// repeat calls a func after each interval until ctx is done. It logs a repeated error once.
func (r *runner) repeat(ctx context.Context, interval time.Duration, failed string, call func() error) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	said := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		err := call()
		switch {
		case err == nil:
			said = ""
		case err.Error() != said && ctx.Err() == nil:
			said = err.Error()
			r.log.Error(failed, "error", err)
		}
	}
}

// stopStandby runs --stop if another replica holds the lease. A term that begins meanwhile
// waits for it, so it must not take longer than a program may take to end.
func (r *runner) stopStandby(ctx context.Context) error {
	select {
	case r.service <- struct{}{}:
		defer func() { <-r.service }()
	default:
		return nil // a term is under way
	}
	if status := r.coordinator.Status(); status.Role != tenure.RoleStandby || status.Holder == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, r.timing.stop)
	defer cancel()
	return runHook(ctx, r.opts.stop, nil, environ(), nil)
}

// errTermOver is the error of a command that was not run. Why the term is over decides how its program ends.
var errTermOver = errors.New("the term is over")

// runForTerm runs a command for the term of ctx, unless that is over. If this process was paused, ctx
// ends only when a timer fires.
func runForTerm(ctx context.Context, line string, env ...string) error {
	term := tenure.TermFromContext(ctx)
	if !term.Valid() {
		return errTermOver
	}
	return runHook(ctx, line, nil, slices.Concat(environ(), termEnv(term), env), os.Stderr)
}

// runHook runs one of the user's commands, for example that of --check. It returns when
// the command has ended, or was killed because ctx is done. If output is nil, the error
// has the last line of the command's output.
func runHook(ctx context.Context, line string, args, env []string, output *os.File) error {
	return runReportedHook(ctx, line, args, env, output, func(report) {})
}

// runReportedHook is runHook that also reports the process group of the command when it
// has started, and when it has ended.
func runReportedHook(ctx context.Context, line string, args, env []string, output *os.File, tell func(report)) error {
	if len(args) > 0 {
		line += ` "$@"`
	}
	cmd := exec.Command("/bin/sh", append([]string{"-c", line, "sh"}, args...)...)
	cmd.Env = env
	cmd.SysProcAttr = ownGroup()

	// A process that dies with its parent (Pdeathsig) dies with the thread that started
	// it, so this thread must stay.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	last := func() tail { return tail{} }
	if output == nil {
		pipe, end, err := collectTail()
		if err != nil {
			return err
		}
		defer pipe.Close()
		output, last = pipe, end
	}
	cmd.Stdout, cmd.Stderr = output, output
	err := ctx.Err()
	if err == nil {
		err = runGroup(ctx, cmd, tell)
	}
	said := last()
	if ctx.Err() != nil {
		return fmt.Errorf("killed: %w", context.Cause(ctx))
	}
	if line := said.line(); err != nil && line != "" {
		return fmt.Errorf("%w: %s", err, line)
	}
	return err
}

// collectTail returns a pipe for a command's output, and a func that returns the end of what
// was written to it so far. The func must be called once, when the command has ended. It does
// not wait for the end of the pipe: a process that the command has left behind may hold it
// open forever.
func collectTail() (w *os.File, end func() tail, err error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	var last tail
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		io.Copy(&last, r)
	}()
	return w, func() tail {
		defer r.Close()
		r.SetReadDeadline(time.Now())
		<-copied
		last.drain(r)
		return last
	}, nil
}

// tail keeps the end of what is written to it.
type tail struct{ buf []byte }

func (t *tail) Write(b []byte) (int, error) {
	const most = 512
	t.buf = append(t.buf, b...)
	t.buf = t.buf[max(0, len(t.buf)-most):]
	return len(b), nil
}

// drain reads what is in a pipe, without waiting for more.
func (t *tail) drain(r *os.File) {
	const most = 16 // as many as a pipe has room for: others may write as fast as this reads
	r.SetReadDeadline(time.Time{})
	conn, err := r.SyscallConn()
	if err != nil {
		return
	}
	buf := make([]byte, 4096)
	conn.Read(func(fd uintptr) (done bool) {
		for range most {
			n, err := syscall.Read(int(fd), buf)
			if n <= 0 && !errors.Is(err, syscall.EINTR) {
				break
			}
			t.Write(buf[:max(0, n)])
		}
		return true
	})
}

func (t *tail) line() string {
	lines := bytes.Split(bytes.TrimSpace(t.buf), []byte("\n"))
	return strings.ToValidUTF8(string(bytes.TrimSpace(lines[len(lines)-1])), "")
}
