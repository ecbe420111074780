package main

import (
	"context"
	"errors"
	"iter"
	"maps"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

// fakeDriver is a [Driver] in memory, for tests in virtual time. Its hooks may be nil.
type fakeDriver struct {
	onCreate func() error          // called before Create
	onList   func()                // called after the instances were listed, before List returns
	onDelete func(id string) error // called before Delete
	gone     chan string           // closing it makes Watch fail

	mu        sync.Mutex
	instances map[string]time.Time
}

func newFakeDriver() *fakeDriver {
	return &fakeDriver{instances: make(map[string]time.Time), gone: make(chan string)}
}

func (d *fakeDriver) Create(_ context.Context, id string) error {
	if d.onCreate != nil {
		if err := d.onCreate(); err != nil {
			return err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.instances[id] = time.Now()
	return nil
}

func (d *fakeDriver) Delete(_ context.Context, id string) error {
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

func (d *fakeDriver) Has(_ context.Context, id string) (exists bool, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, exists = d.instances[id]
	return exists, nil
}

func (d *fakeDriver) List(context.Context) (map[string]time.Time, error) {
	d.mu.Lock()
	instances := maps.Clone(d.instances)
	d.mu.Unlock()
	if d.onList != nil {
		d.onList()
	}
	return instances, nil
}

func (d *fakeDriver) Watch(ctx context.Context) iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		for {
			select {
			case <-ctx.Done():
				return
			case instance, ok := <-d.gone:
				if !ok {
					yield("", errors.New("the backend is out of sight"))
					return
				}
				if !yield(instance, nil) {
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
