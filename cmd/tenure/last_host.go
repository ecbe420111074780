//go:build unix

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"

	"github.com/tenurelib/tenure"
)

// lastHost is an object beside a lease with --peers. It says which host was the last to start the program, and whether nothing of the
// program is left there, so that the host need not be fenced. Each write depends on the version that was read: if a host that was
// paused writes late, the next one finds a host that has not ended.
type lastHost struct {
	Replica string `json:"replica"`
	Ended   bool   `json:"ended,omitempty"`

	store tenure.Store
	obj   tenure.Object // as it was last read or written
}

// readLastHost reads it at the beginning of a term.
func (r *runner) readLastHost(ctx context.Context, store tenure.Store) (*lastHost, error) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	l := &lastHost{store: store, obj: tenure.Object{Key: tenure.Key{Type: "tenure.host", ID: r.opts.key().String()}}}
	obj, err := store.Get(ctx, l.obj.Key)
	if errors.Is(err, tenure.ErrNotFound) {
		return l, nil
	}
	if err == nil {
		l.obj = obj
		err = json.Unmarshal(obj.Payload, l)
	}
	if err != nil {
		err = fmt.Errorf("read which host has started the program: %w", err)
	}
	return l, err
}

// starts notes that the program is about to start on this host. It reports whether what an earlier run has left here may be
// running: then this host has to be fenced by the next one, whatever becomes of this run.
func (l *lastHost) starts(ctx context.Context, replica string) (left bool, err error) {
	left = l.Replica == replica && !l.Ended
	return left, l.write(ctx, replica, false)
}

// ended notes that nothing of the program is left on this host.
func (l *lastHost) ended(ctx context.Context) error { return l.write(ctx, l.Replica, true) }

func (l *lastHost) write(ctx context.Context, replica string, ended bool) (err error) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	l.Replica, l.Ended = replica, ended
	cond := tenure.IfAbsent()
	if l.obj.Version != 0 {
		cond = tenure.IfVersion(l.obj.Version)
	}
	obj := l.obj
	if obj.Payload, err = json.Marshal(l); err == nil {
		l.obj, err = l.store.PutIf(ctx, obj, cond)
	}
	if err != nil {
		err = fmt.Errorf("note which host starts the program: %w", err)
	}
	return err
}

// findsWhatIsLeft reports whether tenure finds all processes that a program has left behind. Elsewhere it misses those that have left
// the program's process group.
const findsWhatIsLeft = runtime.GOOS == "linux"
