//go:build unix

package main

import (
	"context"
	"errors"
	"iter"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tenurelib/tenure/storetest"
)

// fakeDriver is a [Driver] without processes, for tests in virtual time. Its hooks may be
// nil.
type fakeDriver struct {
	onCreate func(id string) // called before Create returns
	onList   func()          // called after the instances were listed, before List returns
	onDelete func(id string) error
	events   chan Event // closing it makes the stream fail

	mu        sync.Mutex
	instances map[string]Instance
}

func newFakeDriver() *fakeDriver {
	return &fakeDriver{instances: make(map[string]Instance), events: make(chan Event)}
}

func (d *fakeDriver) set(inst Instance) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.instances[inst.ID] = inst
}

func (d *fakeDriver) Create(ctx context.Context, id, name string, command []string) (Instance, error) {
	if command[0] == "no-such-command" {
		return Instance{}, errors.New("executable file not found")
	}
	inst := Instance{ID: id, Name: name, Command: command, CreatedAt: time.Now(), PID: 42, Alive: true}
	d.set(inst)
	if d.onCreate != nil {
		d.onCreate(id)
	}
	return inst, nil
}

func (d *fakeDriver) Delete(ctx context.Context, id string) error {
	if d.onDelete != nil {
		if err := d.onDelete(id); err != nil {
			return err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.instances, id)
	return nil
}

func (d *fakeDriver) Get(ctx context.Context, id string) (Instance, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	inst, ok := d.instances[id]
	if !ok {
		return Instance{}, errNoInstance
	}
	return inst, nil
}

func (d *fakeDriver) List(ctx context.Context) ([]Instance, error) {
	d.mu.Lock()
	list := slices.Collect(maps.Values(d.instances))
	d.mu.Unlock()
	if d.onList != nil {
		d.onList()
	}
	return list, nil
}

func (d *fakeDriver) Watch(ctx context.Context) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		for {
			select {
			case <-ctx.Done():
				return
			case event, ok := <-d.events:
				if !ok {
					yield(Event{}, errors.New("the backend is out of sight"))
					return
				}
				if !yield(event, nil) {
					return
				}
			}
		}
	}
}

// newStore returns SQLite in memory, shared by the gateways of a test, which can hook its
// calls. In a bubble of synctest it must be opened there, and works in virtual time.
func newStore(t *testing.T) *storetest.FaultyStore {
	t.Helper()
	store, err := openStore(t.Context(), ":memory:", true, quiet)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, store.Close()) })
	return storetest.Faulty(store, nil)
}

// before returns a hook that runs do before a call on a sandbox. If do fails, so does the
// call.
func before(op string, do func() error) storetest.Hook {
	return func(ctx context.Context, call storetest.Call, pass func(context.Context) error) error {
		if call.Op == op && call.Key.Type == sandboxType {
			if err := do(); err != nil {
				return err
			}
		}
		return pass(ctx)
	}
}

var quiet = slog.New(slog.DiscardHandler)
