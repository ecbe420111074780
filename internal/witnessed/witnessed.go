// Package witnessed is the part of a witness that runs in the witnessed process. A witness is another process on
// the same kernel, which releases this process's leases when this process has died. See package witness.
//
// The process tells its witness which keys it competes for, in lines of JSON on a socket, and never waits for it:
//
//	{"key":["lease","web"]}                    before each acquire
//	{"wake":["tenure.claims","kind tenant"]}   what is to be woken when a session is released
package witnessed

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
)

// Env is the environment variable that leads a process to its witness: NAME:FD:INODE, where NAME is written into
// records and FD is a socket with that inode; or the path of a sidecar's socket; or "off". It is removed when the
// process first competes for a lease, so that the processes that it starts are not witnessed in their own right.
const Env = "TENURE_WITNESS"

// Line is what a process tells its witness.
type Line struct {
	Key  *[2]string `json:"key,omitempty"`
	Wake *[2]string `json:"wake,omitempty"`
}

// link is the connection to the witness of a process.
type link struct {
	attach func() (socket, string, error)

	mu       sync.Mutex
	attached bool
	socket   socket // nil: there is no witness, or it is gone
	name     string
	wakes    []Line // told once it is attached
	failed   error  // not reported yet
}

// socket is what lines are written to. Each write is one line, and waits for a moment at most.
type socket interface {
	Write(line []byte) (int, error)
}

var process = link{attach: attach}

type (
	nameKey struct{}
	ownKey  struct{}
)

// Own returns a context in which a term that this process acquires is its own: no other process relies on the term
// when this one is dead.
func Own(ctx context.Context) context.Context { return context.WithValue(ctx, ownKey{}, true) }

// IsOwn reports whether the context comes from Own.
func IsOwn(ctx context.Context) bool { return ctx.Value(ownKey{}) != nil }

// With returns a context in which the process has a witness with this name, which is told nothing. It is for tests.
func With(ctx context.Context, name string) context.Context {
	return context.WithValue(ctx, nameKey{}, name)
}

// Tell tells the witness of this process that it competes for a key, and returns the name of the witness. The name is
// empty if there is no witness, or if it could not be told. Tell returns an error only the first time that it could
// not.
func Tell(ctx context.Context, kind, id string) (name string, err error) {
	if name, ok := ctx.Value(nameKey{}).(string); ok {
		return name, nil
	}
	return process.tell(kind, id)
}

// TellWake tells the witness what to wake when it has released a session of this process.
func TellWake(kind, id string) { process.tellWake(kind, id) }

// Attach connects to the witness, which Tell does otherwise.
func Attach() {
	process.mu.Lock()
	defer process.mu.Unlock()
	process.begin()
}

// Adopt takes over the variables that systemd has set for the witness: they name the process that systemd has
// started, and this process is its child.
func Adopt() {
	for _, name := range []string{"LISTEN_PID", "WATCHDOG_PID"} {
		if os.Getenv(name) == strconv.Itoa(os.Getppid()) {
			os.Setenv(name, strconv.Itoa(os.Getpid()))
		}
	}
}

func (l *link) tell(kind, id string) (name string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.begin()
	if l.socket != nil {
		if l.write(Line{Key: &[2]string{kind, id}}) {
			name = l.name
		}
	}
	err, l.failed = l.failed, nil
	return name, err
}

func (l *link) tellWake(kind, id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	line := Line{Wake: &[2]string{kind, id}}
	switch {
	case !l.attached:
		l.wakes = append(l.wakes, line)
	case l.socket != nil:
		l.write(line)
	}
}

// begin connects to the witness, unless that was tried before. The caller holds mu.
func (l *link) begin() {
	if l.attached {
		return
	}
	l.attached = true
	l.socket, l.name, l.failed = l.attach()
	for _, line := range l.wakes {
		if l.socket != nil {
			l.write(line)
		}
	}
	l.wakes = nil
}

// write reports whether the witness was told. The caller holds mu.
func (l *link) write(line Line) bool {
	text, err := json.Marshal(line)
	if err != nil {
		panic(fmt.Sprintf("bug: cannot encode strings: %v", err))
	}
	_, err = l.socket.Write(text)
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) { // it may be stopped, and continue later
		l.socket, l.failed = nil, err
	}
	return err == nil
}
