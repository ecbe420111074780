// Package witnessed is the side of a process that runs under a witness: another process on the same kernel, which
// releases its leases when it has died. See package witness.
//
// The process tells its witness which keys it competes for, in lines of JSON on a socket, and never waits for a reply:
//
//	{"key":["lease","web"],"answers":true}     before it sends an acquire, of which it says when it is answered
//	{"answered":["lease","web"]}               when the store has answered an acquire
//	{"wake":["tenure.claims","kind tenant"]}   what the witness wakes when it has released a session
package witnessed

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"
)

// Env is the environment variable by which a process finds its witness: NAME:FD:INODE, where NAME stands in records and
// FD is a socket with that inode; or the path of a sidecar's socket; or "off". The process removes it with its first
// line, so that the processes that it starts do not look for a witness themselves.
const Env = "TENURE_WITNESS"

// Line is what a process tells its witness.
type Line struct {
	Key      [2]string `json:"key,omitzero"`
	Answers  bool      `json:"answers,omitzero"` // false: of an earlier version, which does not say what was answered
	Answered [2]string `json:"answered,omitzero"`
	Wake     [2]string `json:"wake,omitzero"`
}

// link is the connection to the witness of a process.
type link struct {
	mu     sync.Mutex
	attach attacher  // nil if no attempt may succeed any more
	next   time.Time // no attempt begins before it
	socket socket    // nil if there is no witness, or no longer
	name   string
	failed error  // not reported yet
	silent bool   // a failure was reported since the last success
	wakes  []Line // all of them, for a witness that comes later
}

// attacher connects to the witness. The func that it returns connects again later, after a failure or if the connection has
// broken; it is nil if that is in vain.
type attacher func() (_ socket, name string, again attacher, err error)

// attachPause is the time between two attempts to connect.
const attachPause = time.Second

// socket sends lines, one with each write. A write blocks for a moment at most.
type socket interface {
	Write(line []byte) (int, error)
}

var process = link{attach: attach}

type (
	ownKey  struct{}
	testKey struct{}
	test    struct {
		name string
		hear []func(Line)
	}
)

// Own returns a context for acquiring a term on which no other process will rely.
func Own(ctx context.Context) context.Context { return context.WithValue(ctx, ownKey{}, true) }

// IsOwn reports whether the context is of Own.
func IsOwn(ctx context.Context) bool { return ctx.Value(ownKey{}) != nil }

// With returns a context, for tests, in which the process has a witness with this name. The funcs get what it is told.
func With(ctx context.Context, name string, hear ...func(Line)) context.Context {
	return context.WithValue(ctx, testKey{}, test{name, hear})
}

// Tell tells the witness that this process competes for a key, and returns the name of the witness. The name is empty if
// there is no witness, or if the line could not be sent. Only the first failure in a row returns an error.
func Tell(ctx context.Context, kind, id string) (name string, err error) {
	return tell(ctx, Line{Key: [2]string{kind, id}, Answers: true})
}

// Answered tells the witness that the store has answered the acquire that Tell announced: it is no longer under way.
func Answered(ctx context.Context, kind, id string) {
	_, _ = tell(ctx, Line{Answered: [2]string{kind, id}})
}

// TellWake tells the witness what to wake when it has released a session of this process.
func TellWake(kind, id string) {
	_, _ = tell(context.Background(), Line{Wake: [2]string{kind, id}})
}

func tell(ctx context.Context, line Line) (name string, err error) {
	if test, ok := ctx.Value(testKey{}).(test); ok {
		for _, hear := range test.hear {
			hear(line)
		}
		return test.name, nil
	}
	return process.tell(line)
}

// Attach connects to the witness now, and not with the first line.
func Attach() {
	process.mu.Lock()
	defer process.mu.Unlock()
	process.begin(true)
}

// Adopt makes the variables of systemd that name this process's parent name this process. Systemd has started the
// witness, and its sockets and its watchdog are for the program.
func Adopt() {
	for _, name := range []string{"LISTEN_PID", "WATCHDOG_PID"} {
		if os.Getenv(name) == strconv.Itoa(os.Getppid()) {
			os.Setenv(name, strconv.Itoa(os.Getpid()))
		}
	}
}

// tell sends a line to the witness, and returns the name of the witness if that has worked. Only a line with a key
// returns the error, whose caller reports it.
func (l *link) tell(line Line) (name string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	acquires := line.Key != [2]string{}
	l.begin(acquires)
	if l.socket != nil && l.write(line) {
		name = l.name
	}
	if line.Wake != [2]string{} {
		l.wakes = append(l.wakes, line)
	}
	if acquires {
		err, l.failed = l.failed, nil
	}
	return name, err
}

// begin connects to the witness, with the first line, and then with an acquire until it succeeds: a sidecar may listen later
// than this process begins, or may be restarted. The caller holds mu.
func (l *link) begin(acquires bool) {
	first := l.next.IsZero()
	if l.socket != nil || l.attach == nil || !first && (!acquires || time.Now().Before(l.next)) {
		return
	}
	var err error
	l.socket, l.name, l.attach, err = l.attach()
	l.next = time.Now().Add(attachPause)
	switch {
	case err == nil:
		l.silent = false
		for _, wake := range l.wakes {
			if l.socket != nil {
				l.write(wake)
			}
		}
	case !l.silent:
		l.failed, l.silent = err, true
	}
}

// write reports whether the line was sent. The caller holds mu.
func (l *link) write(line Line) bool {
	text, err := json.Marshal(line)
	if err != nil {
		panic(fmt.Sprintf("bug: cannot encode strings: %v", err))
	}
	_, err = l.socket.Write(text)
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) { // after that error, the witness may still read again
		// It is not closed: the program may have closed the descriptor, which may be another file by now.
		l.socket, l.failed, l.silent = nil, err, true
	}
	return err == nil
}
