//go:build unix

package main

import (
	"context"
	"errors"
	"iter"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

// fakeDriver is a [Driver] without processes, for tests in virtual time. Its hooks may be
// nil.
type fakeDriver struct {
	onCreate func(id string) // called before Create returns
	onList   func()          // called after the instances were listed, before List returns
	onDelete func(id string) error
	exits    chan Instance // closing it makes Watch fail

	mu        sync.Mutex
	instances map[string]Instance
}

func newFakeDriver() *fakeDriver {
	return &fakeDriver{instances: make(map[string]Instance), exits: make(chan Instance)}
}

func (d *fakeDriver) set(inst Instance) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.instances[inst.ID] = inst
}

// has returns whether there is an instance, and whether it is alive.
func (d *fakeDriver) has(id string) (exists, alive bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	inst, exists := d.instances[id]
	return exists, inst.Alive
}

func (d *fakeDriver) Create(_ context.Context, id string, command []string) (pid int, err error) {
	if command[0] == "no-such-command" {
		return 0, errors.New("executable file not found")
	}
	d.set(Instance{ID: id, CreatedAt: time.Now(), PID: 42, Alive: true})
	if d.onCreate != nil {
		d.onCreate(id)
	}
	return 42, nil
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

func (d *fakeDriver) List(ctx context.Context) ([]Instance, error) {
	d.mu.Lock()
	list := slices.Collect(maps.Values(d.instances))
	d.mu.Unlock()
	if d.onList != nil {
		d.onList()
	}
	return list, nil
}

func (d *fakeDriver) Watch(ctx context.Context) iter.Seq2[Instance, error] {
	return func(yield func(Instance, error) bool) {
		for {
			select {
			case <-ctx.Done():
				return
			case inst, ok := <-d.exits:
				if !ok {
					yield(Instance{}, errors.New("the backend is out of sight"))
					return
				}
				if !yield(inst, nil) {
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
	store, err := tenure.OpenSQLite(t.Context(), ":memory:", tenure.SQLiteConfig{Shared: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, store.Close()) })
	require.NoError(t, store.Migrate(t.Context()))
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
