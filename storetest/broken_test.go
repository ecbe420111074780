package storetest_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

// broken is a Mem with some of its methods replaced.
type broken struct {
	*storetest.Mem
	get  func(ctx context.Context, key tenure.Key) (tenure.Object, error)
	put  func(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error)
	del  func(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error
	list func(ctx context.Context, objectType, after string, limit int) ([]tenure.Object, error)

	fence func(guard tenure.Guard) (tenure.Store, error)

	watch func(key tenure.Key) tenure.Subscription
	wake  func(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error
	hint  func(ctx context.Context, key tenure.Key) error // nil: Mem's

	unnamed bool
}

func (b *broken) Traits() tenure.Traits { return tenure.Traits{Nameless: b.unnamed} }

func (b *broken) Get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	return b.get(ctx, key)
}

func (b *broken) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
	return b.put(ctx, obj, cond)
}

func (b *broken) DeleteIf(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
	return b.del(ctx, key, cond)
}

func (b *broken) List(ctx context.Context, objectType, after string, limit int) ([]tenure.Object, error) {
	return b.list(ctx, objectType, after, limit)
}

func (b *broken) Fence(guard tenure.Guard) (tenure.Store, error) { return b.fence(guard) }

func (b *broken) Watch(key tenure.Key) tenure.Subscription { return b.watch(key) }

func (b *broken) DeleteAndWake(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
	return b.wake(ctx, key, cond)
}

func (b *broken) Wake(ctx context.Context, key tenure.Key) error {
	if b.hint == nil {
		return b.Mem.Wake(ctx, key)
	}
	return b.hint(ctx, key)
}

// brokenWatch is a Mem's watch with some of its methods replaced.
type brokenWatch struct {
	tenure.Subscription
	c    <-chan struct{}
	stop func()
}

func (w *brokenWatch) C() <-chan struct{} { return w.c }
func (w *brokenWatch) Stop()              { w.stop() }

// brokenChanges reports the present state of a Mem, falsified by a func.
type brokenChanges struct {
	tenure.Subscription
	mem    *storetest.Mem
	key    tenure.Key
	change func(*tenure.Change)
}

func (w *brokenChanges) Last() (tenure.Change, bool) {
	obj, err := w.mem.Get(context.Background(), w.key)
	obj.Key = w.key
	change := tenure.Change{Object: obj, Deleted: err != nil}
	w.change(&change)
	return change, true
}

// behindFence replaces DeleteAndWake of the fenced store.
func (b *broken) behindFence(wake func(term *tenure.Term, fenced tenure.Store) func(context.Context, tenure.Key, tenure.WriteCondition) error) {
	b.fence = func(guard tenure.Guard) (tenure.Store, error) {
		term, _ := guard.(*tenure.Term)
		fenced, err := b.Mem.Fence(term)
		if err != nil {
			return nil, err
		}
		return &broken{
			Mem: b.Mem, get: fenced.Get, put: fenced.PutIf, del: fenced.DeleteIf, list: b.Mem.List, fence: fenced.(tenure.Fencer).Fence,
			watch: b.Mem.Watch, wake: wake(term, fenced),
		}, nil
	}
}

// checkedFirst makes a fence that is only a check before each write.
func (b *broken) checkedFirst(check func(term *tenure.Term, obj tenure.Object, cond tenure.WriteCondition) error, then func(*tenure.Term) tenure.Store) {
	b.fence = func(guard tenure.Guard) (tenure.Store, error) {
		term, _ := guard.(*tenure.Term)
		store := then(term)
		return &broken{
			Mem:  b.Mem,
			get:  b.Mem.Get,
			list: b.Mem.List,
			put: func(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
				if err := check(term, obj, cond); err != nil {
					return tenure.Object{}, err
				}
				return store.PutIf(ctx, obj, cond)
			},
			del: func(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
				if err := check(term, tenure.Object{Key: key}, cond); err != nil {
					return err
				}
				return store.DeleteIf(ctx, key, cond)
			},
		}, nil
	}
}

// record returns the lease's object.
func (b *broken) record(term *tenure.Term) tenure.Object {
	obj, _ := b.Mem.Get(context.Background(), term.Key())
	return obj
}

// reads lets change falsify what Get and, with alsoPut, PutIf return.
func (b *broken) reads(change func(*tenure.Object), alsoPut bool) {
	b.get = func(ctx context.Context, key tenure.Key) (tenure.Object, error) {
		obj, err := b.Mem.Get(ctx, key)
		change(&obj)
		return obj, err
	}
	if alsoPut {
		b.put = func(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
			obj, err := b.Mem.PutIf(ctx, obj, cond)
			change(&obj)
			return obj, err
		}
	}
}

// writes lets change falsify what PutIf is given.
func (b *broken) writes(change func(*tenure.Object, *tenure.WriteCondition)) {
	b.put = func(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
		change(&obj, &cond)
		return b.Mem.PutIf(ctx, obj, cond)
	}
}

// fails lets change falsify the errors.
func (b *broken) fails(change func(ctx context.Context, key tenure.Key, err error) error) {
	b.get = func(ctx context.Context, key tenure.Key) (tenure.Object, error) {
		obj, err := b.Mem.Get(ctx, key)
		return obj, change(ctx, key, err)
	}
	b.put = func(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
		written, err := b.Mem.PutIf(ctx, obj, cond)
		return written, change(ctx, obj.Key, err)
	}
	b.del = func(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
		return change(ctx, key, b.Mem.DeleteIf(ctx, key, cond))
	}
}

// keys lets change falsify the keys under which objects are stored.
func (b *broken) keys(change func(tenure.Key) tenure.Key) {
	b.get = func(ctx context.Context, key tenure.Key) (tenure.Object, error) {
		obj, err := b.Mem.Get(ctx, change(key))
		obj.Key = key
		return obj, err
	}
	b.put = func(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
		key := obj.Key
		obj.Key = change(key)
		obj, err := b.Mem.PutIf(ctx, obj, cond)
		obj.Key = key
		return obj, err
	}
	b.del = func(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
		return b.Mem.DeleteIf(ctx, change(key), cond)
	}
}

// readThenWrite checks conditions before the write instead of atomically with it.
func readThenWrite(b *broken) {
	b.put = func(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
		current, err := b.Mem.Get(ctx, obj.Key)
		if err != nil && !errors.Is(err, tenure.ErrNotFound) {
			return tenure.Object{}, err
		}
		if err := cond.Check(obj.Key, current.Version); err != nil {
			return tenure.Object{}, err
		}
		runtime.Gosched()
		return b.Mem.PutIf(ctx, obj, tenure.Unconditional())
	}
}

// restart forgets an object's version when the object is deleted, as plain DELETE and INSERT do.
func restart(b *broken) {
	fresh := func() *storetest.Mem {
		mem := storetest.NewMem()
		mem.Now = func() time.Time { return time.UnixMicro(0) }
		return mem
	}
	b.Mem = fresh()
	b.reads(func(*tenure.Object) {}, true) // reads whatever b.Mem is at that time
	b.del = func(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
		err := b.Mem.DeleteIf(ctx, key, cond)
		if err == nil {
			b.Mem = fresh()
		}
		return err
	}
}

// collidingNames keeps names outside of the Mem, where they never collide.
func collidingNames(b *broken) {
	var names sync.Map
	b.put = func(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
		name := obj.Name
		obj.Name = ""
		obj, err := b.Mem.PutIf(ctx, obj, cond)
		if err == nil {
			names.Store(obj.Key, name)
		}
		obj.Name = name
		return obj, err
	}
	b.get = func(ctx context.Context, key tenure.Key) (tenure.Object, error) {
		obj, err := b.Mem.Get(ctx, key)
		if name, ok := names.Load(key); ok {
			obj.Name = name.(string)
		}
		return obj, err
	}
}

// hoarded reserves a name for the first object that had it, for all types and even
// after that object is gone.
func hoarded(b *broken) {
	owners := make(map[string]tenure.Key)
	b.put = func(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
		if owner, ok := owners[obj.Name]; ok && owner != obj.Key {
			return tenure.Object{}, tenure.ErrTaken
		}
		owners[obj.Name] = obj.Key
		return b.Mem.PutIf(ctx, obj, cond)
	}
}

// ignoreContext ignores the end of contexts.
func ignoreContext(b *broken) {
	b.get = func(ctx context.Context, key tenure.Key) (tenure.Object, error) {
		return b.Mem.Get(context.WithoutCancel(ctx), key)
	}
	b.list = func(ctx context.Context, objectType, after string, limit int) ([]tenure.Object, error) {
		return b.Mem.List(context.WithoutCancel(ctx), objectType, after, limit)
	}
}

// withLineages gives the Mem lineages, and passes its writes through falsify; plain is the condition without
// a server.
func withLineages(b *broken, falsify func(obj tenure.Object, cond, plain tenure.WriteCondition) (tenure.Object, error)) {
	b.Lineages = true
	b.put = func(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
		plain := tenure.IfAbsent()
		if was, err := b.Mem.Get(ctx, obj.Key); err == nil {
			plain = tenure.IfVersion(was.Version)
		}
		return falsify(obj, cond, plain)
	}
}

// breakages are the ways to break a store, at least one for each rule of Run.
var breakages = []struct {
	rule  string // that must fail
	what  string
	apply func(b *broken)
}{
	{"a write for another server is refused", "conditions are kept without their server", func(b *broken) {
		withLineages(b, func(obj tenure.Object, _, plain tenure.WriteCondition) (tenure.Object, error) {
			return b.Mem.PutIf(context.Background(), obj, plain)
		})
	}},
	{"a write for another server is refused", "it is done all the same", func(b *broken) {
		withLineages(b, func(obj tenure.Object, cond, plain tenure.WriteCondition) (tenure.Object, error) {
			written, err := b.Mem.PutIf(context.Background(), obj, cond)
			if errors.Is(err, tenure.ErrMoved) {
				_, _ = b.Mem.PutIf(context.Background(), obj, plain)
			}
			return written, err
		})
	}},
	{"a write for another server is refused", "versions ignore the least", func(b *broken) {
		withLineages(b, func(obj tenure.Object, cond, plain tenure.WriteCondition) (tenure.Object, error) {
			if on, _ := b.Mem.Lineage(context.Background()); cond.CheckServer(on.Server) != nil {
				return tenure.Object{}, tenure.ErrMoved
			}
			return b.Mem.PutIf(context.Background(), obj, plain)
		})
	}},
	{"a write for another server is refused", "DeleteIf forgets the server", func(b *broken) {
		b.Lineages = true
		b.del = func(ctx context.Context, key tenure.Key, _ tenure.WriteCondition) error {
			is, _ := b.Mem.Get(ctx, key)
			return b.Mem.DeleteIf(ctx, key, tenure.IfVersion(is.Version))
		}
	}},
	{"a write for another server is refused", "DeleteAndWake forgets the server", func(b *broken) {
		b.Lineages = true
		b.wake = func(ctx context.Context, key tenure.Key, _ tenure.WriteCondition) error {
			is, _ := b.Mem.Get(ctx, key)
			return b.Mem.DeleteAndWake(ctx, key, tenure.IfVersion(is.Version))
		}
	}},
	{"a missing object is not found", "an empty object is returned instead", func(b *broken) {
		b.fails(func(_ context.Context, _ tenure.Key, err error) error {
			if errors.Is(err, tenure.ErrNotFound) {
				return nil
			}
			return err
		})
	}},
	{"an object reads back as it was written", "the name is not stored", func(b *broken) {
		b.reads(func(obj *tenure.Object) { obj.Name = "" }, false)
	}},
	{"an object reads back as it was written", "a write returns no times", func(b *broken) {
		b.reads(func(obj *tenure.Object) { obj.CreatedAt, obj.UpdatedAt = time.Time{}, time.Time{} }, true)
	}},
	{"the store assigns versions and times", "the caller's CreatedAt is stored", func(b *broken) {
		var caller tenure.Object
		b.writes(func(obj *tenure.Object, _ *tenure.WriteCondition) { caller = *obj })
		b.get = func(ctx context.Context, key tenure.Key) (tenure.Object, error) {
			obj, err := b.Mem.Get(ctx, key)
			obj.CreatedAt = caller.CreatedAt
			return obj, err
		}
	}},
	{"age counts from the last write", "objects do not age", func(b *broken) {
		b.reads(func(obj *tenure.Object) { obj.Age = 0 }, false)
	}},
	{"age counts from the last write", "objects age too soon", func(b *broken) {
		b.reads(func(obj *tenure.Object) { obj.Age += 20 * time.Millisecond }, false)
	}},
	{"age counts from the last write", "age counts from the object's creation", func(b *broken) {
		b.reads(func(obj *tenure.Object) { obj.Age += obj.UpdatedAt.Sub(obj.CreatedAt) }, false)
	}},
	{"a replaced object keeps its creation time", "a replacement sets CreatedAt", func(b *broken) {
		b.reads(func(obj *tenure.Object) { obj.CreatedAt = obj.UpdatedAt }, false)
	}},
	{"a stored object shares no memory with callers", "the caller's slices are kept", func(b *broken) {
		var caller tenure.Object
		b.writes(func(obj *tenure.Object, _ *tenure.WriteCondition) { caller = *obj })
		b.get = func(ctx context.Context, key tenure.Key) (tenure.Object, error) {
			obj, err := b.Mem.Get(ctx, key)
			obj.Payload, obj.Labels = caller.Payload, caller.Labels
			return obj, err
		}
	}},
	{"a payload is kept byte for byte", "payloads are text", func(b *broken) {
		b.writes(func(obj *tenure.Object, _ *tenure.WriteCondition) {
			obj.Payload = []byte(strings.ToValidUTF8(string(obj.Payload), "?"))
		})
	}},
	{"a payload is kept byte for byte", "payloads are truncated to 64 KiB", func(b *broken) {
		b.writes(func(obj *tenure.Object, _ *tenure.WriteCondition) {
			obj.Payload = obj.Payload[:min(1<<16, len(obj.Payload))]
		})
	}},
	{"labels are kept character by character", "labels are folded to lower case", func(b *broken) {
		b.writes(func(obj *tenure.Object, _ *tenure.WriteCondition) {
			labels := make(map[string]string)
			for k, v := range obj.Labels {
				labels[strings.ToLower(k)] = v
			}
			obj.Labels = labels
		})
	}},
	{"keys that look alike stay apart", "ids are folded to lower case", func(b *broken) {
		b.keys(func(key tenure.Key) tenure.Key { return tenure.Key{Type: key.Type, ID: strings.ToLower(key.ID)} })
	}},
	{"keys that look alike stay apart", "type and id are concatenated", func(b *broken) {
		b.keys(func(key tenure.Key) tenure.Key { return tenure.Key{Type: "joined", ID: key.String()} })
	}},
	{"an id under another type is another object", "the type is not part of the key", func(b *broken) {
		b.keys(func(key tenure.Key) tenure.Key { return tenure.Key{Type: "any", ID: key.ID} })
	}},

	{"IfAbsent overwrites nothing", "IfAbsent overwrites", func(b *broken) {
		b.writes(func(_ *tenure.Object, cond *tenure.WriteCondition) { *cond = tenure.Unconditional() })
	}},
	{"IfVersion writes at that version only", "IfVersion is ignored", func(b *broken) {
		b.writes(func(_ *tenure.Object, cond *tenure.WriteCondition) { *cond = tenure.Unconditional() })
	}},
	{"IfVersion writes at that version only", "a conflict writes anyway", func(b *broken) {
		b.put = func(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
			written, err := b.Mem.PutIf(ctx, obj, cond)
			if errors.Is(err, tenure.ErrConflict) {
				b.Mem.PutIf(ctx, obj, tenure.Unconditional())
			}
			return written, err
		}
	}},
	{"IfVersion writes at that version only", "a conflict does not name the current version", func(b *broken) {
		b.fails(func(_ context.Context, key tenure.Key, err error) error {
			if errors.Is(err, tenure.ErrConflict) {
				return fmt.Errorf("%s: %w", key, tenure.ErrConflict)
			}
			return err
		})
	}},
	{"IfVersion creates nothing", "IfVersion creates what is missing", func(b *broken) {
		b.put = func(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
			if _, err := b.Mem.Get(ctx, obj.Key); errors.Is(err, tenure.ErrNotFound) {
				cond = tenure.IfAbsent()
			}
			return b.Mem.PutIf(ctx, obj, cond)
		}
	}},
	{"Unconditional creates and replaces", "Unconditional only creates", func(b *broken) {
		b.writes(func(_ *tenure.Object, cond *tenure.WriteCondition) {
			if *cond == tenure.Unconditional() {
				*cond = tenure.IfAbsent()
			}
		})
	}},
	{"DeleteIf deletes at that version only", "DeleteIf deletes without a version", func(b *broken) {
		b.del = func(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
			if is, err := b.Mem.Get(ctx, key); err == nil && cond == tenure.Unconditional() {
				cond = tenure.IfVersion(is.Version)
			}
			return b.Mem.DeleteIf(ctx, key, cond)
		}
	}},
	{"DeleteIf deletes at that version only", "DeleteIf ignores the version", func(b *broken) {
		b.del = func(ctx context.Context, key tenure.Key, _ tenure.WriteCondition) error {
			obj, err := b.Mem.Get(ctx, key)
			if err != nil {
				return err
			}
			return b.Mem.DeleteIf(ctx, key, tenure.IfVersion(obj.Version))
		}
	}},

	{"versions go on after a deletion", "versions restart after a deletion", restart},
	{"a stale version fails against a later life", "versions restart after a deletion", restart},

	{"of many concurrent creates one succeeds", "checks before the write", readThenWrite},
	{"of many writes and deletions of one version one succeeds", "checks before the write", readThenWrite},
	{"of many creates with one name one succeeds", "names are not compared", collidingNames},
	{"versions rise under concurrent writers", "two writes get the same version", func(b *broken) {
		b.Now = func() time.Time { return time.UnixMicro(0) }
		b.put = func(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
			obj, err := b.Mem.PutIf(ctx, obj, cond)
			obj.Version = (obj.Version + 1) / 2
			return obj, err
		}
	}},
	{"versions rise under concurrent writers", "reads are stale", func(b *broken) {
		var cache sync.Map
		b.get = func(ctx context.Context, key tenure.Key) (tenure.Object, error) {
			if old, ok := cache.Load(key); ok {
				return old.(tenure.Object), nil
			}
			obj, err := b.Mem.Get(ctx, key)
			if err == nil {
				cache.Store(key, obj)
			}
			return obj, err
		}
	}},

	{"a name belongs to one object of its type", "names are not compared", collidingNames},
	{"a name belongs to one object of its type", "a taken name is ErrExists", func(b *broken) {
		b.fails(func(_ context.Context, key tenure.Key, err error) error {
			if errors.Is(err, tenure.ErrTaken) {
				return fmt.Errorf("put %s: %w", key, tenure.ErrExists)
			}
			return err
		})
	}},
	{"a name is free when its object gives it up", "a name is never given up", hoarded},
	{"names of other types and empty names never collide", "a name is never given up", hoarded},

	{"a call whose context has ended returns its error", "contexts are ignored", ignoreContext},
	{"a call whose context has ended returns its error", "the error does not wrap the context's", func(b *broken) {
		b.fails(func(ctx context.Context, key tenure.Key, err error) error {
			if ctx.Err() != nil {
				return fmt.Errorf("%s: %v", key, err)
			}
			return err
		})
	}},
	{"a cancelled write is atomic", "labels are written before the payload", func(b *broken) {
		b.put = func(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
			if half, err := b.Mem.Get(ctx, obj.Key); err == nil && cond == tenure.Unconditional() {
				half.Labels = obj.Labels
				b.Mem.PutIf(ctx, half, cond)
				select {
				case <-ctx.Done():
				case <-time.After(500 * time.Microsecond):
				}
			}
			return b.Mem.PutIf(ctx, obj, cond)
		}
	}},
	{"a store without names refuses them", "it drops them", func(b *broken) {
		b.unnamed = true
		b.writes(func(obj *tenure.Object, _ *tenure.WriteCondition) { obj.Name = "" })
	}},
	{"a store without names refuses them", "it refuses them too late", func(b *broken) {
		b.unnamed = true
		put := b.put
		b.put = func(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
			if written, err := put(ctx, obj, cond); err != nil || obj.Name == "" {
				return written, err
			}
			return tenure.Object{}, errors.ErrUnsupported
		}
	}},
	{"a payload is kept byte for byte", "a limit below 64 KiB", func(b *broken) {
		put := b.put
		b.put = func(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
			if len(obj.Payload) > 60_000 {
				return tenure.Object{}, tenure.ErrInvalid
			}
			return put(ctx, obj, cond)
		}
	}},
	{"a payload is kept byte for byte", "what is above the limit is refused and kept", func(b *broken) {
		b.put = func(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
			written, err := b.Mem.PutIf(ctx, obj, cond)
			if err == nil && len(obj.Payload) > 100_000 {
				return tenure.Object{}, tenure.ErrInvalid
			}
			return written, err
		}
	}},
	{"an error names the operation and the key", "errors have no key", func(b *broken) {
		b.fails(func(_ context.Context, key tenure.Key, err error) error {
			if errors.Is(err, tenure.ErrExists) {
				return tenure.ErrExists
			}
			return err
		})
	}},
	{"an error names the operation and the key", "errors have no operation", func(b *broken) {
		b.fails(func(ctx context.Context, key tenure.Key, err error) error {
			if ctx.Err() != nil {
				return fmt.Errorf("%s: %w", key, ctx.Err())
			}
			return err
		})
	}},
	{"invalid arguments are rejected before anything is sent", "the context is checked first", func(b *broken) {
		b.fails(func(ctx context.Context, key tenure.Key, err error) error {
			if ctx.Err() != nil {
				return fmt.Errorf("%s: %w", key, ctx.Err())
			}
			return err
		})
	}},
	{"invalid arguments are rejected before anything is sent", "a payload that is too long is truncated", func(b *broken) {
		b.writes(func(obj *tenure.Object, _ *tenure.WriteCondition) {
			obj.Payload = obj.Payload[:min(tenure.MaxPayload, len(obj.Payload))]
		})
	}},

	{"a list is sorted, limited and of one type", "sorted backwards", func(b *broken) {
		b.list = func(ctx context.Context, objectType, after string, limit int) ([]tenure.Object, error) {
			objects, err := b.Mem.List(ctx, objectType, after, limit)
			slices.Reverse(objects)
			return objects, err
		}
	}},
	{"a list is sorted, limited and of one type", "the limit is ignored", func(b *broken) {
		b.list = func(ctx context.Context, objectType, after string, _ int) ([]tenure.Object, error) {
			return b.Mem.List(ctx, objectType, after, 1<<20)
		}
	}},
	{"pages of a list fit together", "sorted by one collation, compared by another", func(b *broken) {
		b.list = func(ctx context.Context, objectType, after string, limit int) ([]tenure.Object, error) {
			objects, err := b.Mem.List(ctx, objectType, after, 1<<20)
			slices.SortStableFunc(objects, func(a, b tenure.Object) int {
				return strings.Compare(strings.ToLower(a.Key.ID), strings.ToLower(b.Key.ID))
			})
			return objects[:min(limit, len(objects))], err
		}
	}},
	{"tenure.List yields every object once", "each page is the first", func(b *broken) {
		b.list = func(ctx context.Context, objectType, _ string, limit int) ([]tenure.Object, error) {
			return b.Mem.List(ctx, objectType, "", limit)
		}
	}},
	{"tenure.List yields every object once", "pages are too short", func(b *broken) {
		b.list = func(ctx context.Context, objectType, after string, limit int) ([]tenure.Object, error) {
			return b.Mem.List(ctx, objectType, after, min(limit, 100))
		}
	}},
	{"a list whose context has ended returns its error", "contexts are ignored", ignoreContext},

	{"an invalid list is rejected", "a negative limit means none", func(b *broken) {
		b.list = func(ctx context.Context, objectType, after string, limit int) ([]tenure.Object, error) {
			if limit < 0 {
				limit = math.MaxInt
			}
			return b.Mem.List(ctx, objectType, after, limit)
		}
	}},

	{"a fence lets the writes of a current term through", "a renewal breaks the fence", func(b *broken) {
		b.checkedFirst(func(term *tenure.Term, _ tenure.Object, _ tenure.WriteCondition) error {
			if b.record(term).Version != term.Token() {
				return tenure.ErrLost
			}
			return nil
		}, func(*tenure.Term) tenure.Store { return b.Mem })
	}},
	{"a fence that can't work is rejected", "a nil term means no fence", func(b *broken) {
		b.fence = func(guard tenure.Guard) (tenure.Store, error) {
			if term, ok := guard.(*tenure.Term); !ok || term == nil {
				return b.Mem, nil
			}
			return b.Mem.Fence(guard)
		}
	}},
	{"a fence holds back the writes of a term that is over", "there is no fence", func(b *broken) {
		b.fence = func(tenure.Guard) (tenure.Store, error) { return b.Mem, nil }
	}},
	{"a fence holds back the writes of a term that is over", "a conflict hides the loss", func(b *broken) {
		b.checkedFirst(func(_ *tenure.Term, obj tenure.Object, cond tenure.WriteCondition) error {
			current, _ := b.Mem.Get(context.Background(), obj.Key)
			return cond.Check(obj.Key, current.Version)
		}, func(term *tenure.Term) tenure.Store {
			fenced, _ := b.Mem.Fence(term)
			return fenced
		})
	}},
	{"a fenced write never follows a takeover", "the check is a separate call before the write", func(b *broken) {
		b.checkedFirst(func(term *tenure.Term, _ tenure.Object, _ tenure.WriteCondition) error {
			if !bytes.Equal(b.record(term).Payload, term.Record()) {
				return tenure.ErrLost
			}
			time.Sleep(100 * time.Microsecond)
			return nil
		}, func(*tenure.Term) tenure.Store { return b.Mem })
	}},

	{"every change arrives at every watch of the object", "the time of arrival is left out", func(b *broken) {
		b.watch = func(key tenure.Key) tenure.Subscription {
			return &brokenChanges{b.Mem.Watch(key), b.Mem, key, func(*tenure.Change) {}}
		}
	}},
	{"every change arrives at every watch of the object", "a change does not tell the labels", func(b *broken) {
		b.watch = func(key tenure.Key) tenure.Subscription {
			return &brokenChanges{b.Mem.Watch(key), b.Mem, key, func(c *tenure.Change) { c.Arrived, c.Object.Labels = time.Now(), nil }}
		}
	}},
	{"every change arrives at every watch of the object", "a deletion does not arrive", func(b *broken) {
		b.watch = func(key tenure.Key) tenure.Subscription {
			return &brokenChanges{b.Mem.Watch(key), b.Mem, key, func(c *tenure.Change) { c.Arrived, c.Deleted = time.Now(), false }}
		}
	}},
	{"DeleteAndWake deletes as DeleteIf does", "it deletes at any version", func(b *broken) {
		b.wake = func(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
			if obj, err := b.Mem.Get(ctx, key); err == nil && cond.ValidateDelete() == nil {
				cond = tenure.IfVersion(obj.Version)
			}
			return b.Mem.DeleteAndWake(ctx, key, cond)
		}
	}},
	{"DeleteAndWake deletes as DeleteIf does", "a conflict wakes and returns nil", func(b *broken) {
		b.wake = func(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
			if err := b.Mem.DeleteAndWake(ctx, key, cond); !errors.Is(err, tenure.ErrConflict) {
				return err
			}
			return nil
		}
	}},
	{"DeleteAndWake deletes as DeleteIf does", "a conflict does not name the current version", func(b *broken) {
		b.wake = func(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
			err := b.Mem.DeleteAndWake(ctx, key, cond)
			if errors.Is(err, tenure.ErrConflict) {
				return fmt.Errorf("delete %s: %w", key, tenure.ErrConflict)
			}
			return err
		}
	}},
	{"DeleteAndWake deletes as DeleteIf does", "a missing object is no error", func(b *broken) {
		b.wake = func(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
			if err := b.Mem.DeleteAndWake(ctx, key, cond); !errors.Is(err, tenure.ErrNotFound) {
				return err
			}
			return nil
		}
	}},
	{"DeleteAndWake deletes as DeleteIf does", "the context is checked first", func(b *broken) {
		b.wake = func(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
			if ctx.Err() != nil {
				return fmt.Errorf("delete %s: %w", key, ctx.Err())
			}
			return b.Mem.DeleteAndWake(ctx, key, cond)
		}
	}},
	{"DeleteAndWake deletes as DeleteIf does", "contexts are ignored", func(b *broken) {
		b.wake = func(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
			return b.Mem.DeleteAndWake(context.WithoutCancel(ctx), key, cond)
		}
	}},
	{"DeleteAndWake deletes as DeleteIf does", "it checks before the deletion", func(b *broken) {
		b.wake = func(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
			obj, err := b.Mem.Get(ctx, key)
			if err != nil || cond.ValidateDelete() != nil || cond.Check(key, obj.Version) != nil {
				return b.Mem.DeleteAndWake(ctx, key, cond)
			}
			time.Sleep(time.Millisecond)
			b.Mem.DeleteAndWake(ctx, key, cond)
			return nil
		}
	}},
	{"DeleteAndWake deletes as DeleteIf does", "versions restart after it", func(b *broken) {
		restart(b)
		b.wake = func(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
			return b.del(ctx, key, cond)
		}
	}},

	{"a deletion wakes every watch of the object", "it wakes nobody", func(b *broken) { b.wake = b.Mem.DeleteIf }},
	{"a deletion wakes every watch of the object", "it wakes only one watch", func(b *broken) {
		first := make(map[tenure.Key]bool)
		b.watch = func(key tenure.Key) tenure.Subscription {
			w := b.Mem.Watch(key)
			if first[key] {
				return &brokenWatch{w, nil, w.Stop}
			}
			first[key] = true
			return w
		}
	}},
	{"a deletion wakes every watch of the object", "it wakes only watches that began while the object existed", func(b *broken) {
		b.watch = func(key tenure.Key) tenure.Subscription {
			w := b.Mem.Watch(key)
			if _, err := b.Mem.Get(context.Background(), key); err != nil {
				return &brokenWatch{w, nil, w.Stop}
			}
			return w
		}
	}},
	{"a deletion wakes every watch of the object", "it wakes only once", func(b *broken) {
		woken := make(map[tenure.Key]bool)
		b.wake = func(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
			if woken[key] {
				return b.Mem.DeleteIf(ctx, key, cond)
			}
			woken[key] = true
			return b.Mem.DeleteAndWake(ctx, key, cond)
		}
	}},
	{"a deletion wakes every watch of the object", "a key with a quote gets no hint", func(b *broken) {
		b.wake = func(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
			if strings.Contains(key.ID, "'") {
				return b.Mem.DeleteIf(ctx, key, cond)
			}
			return b.Mem.DeleteAndWake(ctx, key, cond)
		}
	}},
	{"a deletion wakes every watch of the object", "a hint is lost if nobody is receiving", func(b *broken) {
		b.watch = func(key tenure.Key) tenure.Subscription {
			w := b.Mem.Watch(key)
			c, stopped := make(chan struct{}), make(chan struct{})
			go func() {
				for {
					select {
					case <-stopped:
						return
					case <-w.C():
					}
					select {
					case c <- struct{}{}:
					default:
					}
				}
			}()
			return &brokenWatch{w, c, sync.OnceFunc(func() { close(stopped) })}
		}
	}},
	{"a deletion wakes every watch of the object", "it waits until the hint is received", func(b *broken) {
		c := make(chan struct{})
		b.watch = func(key tenure.Key) tenure.Subscription {
			w := b.Mem.Watch(key)
			return &brokenWatch{w, c, w.Stop}
		}
		b.wake = func(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
			err := b.Mem.DeleteIf(ctx, key, cond)
			if err == nil {
				select {
				case c <- struct{}{}:
				case <-ctx.Done():
					return fmt.Errorf("delete %s: %w", key, ctx.Err())
				}
			}
			return err
		}
	}},

	{"Wake wakes every watch of the object", "it wakes nobody", func(b *broken) {
		b.hint = func(_ context.Context, key tenure.Key) error { return key.Validate() }
	}},
	{"Wake wakes every watch of the object", "it wakes only if the object exists", func(b *broken) {
		b.hint = func(ctx context.Context, key tenure.Key) error {
			if _, err := b.Mem.Get(ctx, key); errors.Is(err, tenure.ErrNotFound) {
				return nil
			}
			return b.Mem.Wake(ctx, key)
		}
	}},
	{"Wake wakes every watch of the object", "it accepts an invalid key", func(b *broken) {
		b.hint = func(ctx context.Context, key tenure.Key) error {
			b.Mem.Wake(ctx, key)
			return nil
		}
	}},

	{"a watch may be stopped twice", "a second Stop counts as that of another watch", func(b *broken) {
		var watches atomic.Int64
		b.watch = func(key tenure.Key) tenure.Subscription {
			watches.Add(1)
			w := b.Mem.Watch(key)
			return &brokenWatch{w, w.C(), func() { watches.Add(-1); w.Stop() }}
		}
		b.wake = func(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
			if watches.Load() <= 0 {
				return b.Mem.DeleteIf(ctx, key, cond)
			}
			return b.Mem.DeleteAndWake(ctx, key, cond)
		}
	}},

	{"a fenced deletion wakes while the term is current", "it wakes nobody", func(b *broken) {
		b.behindFence(func(_ *tenure.Term, fenced tenure.Store) func(context.Context, tenure.Key, tenure.WriteCondition) error {
			return fenced.DeleteIf
		})
	}},
	{"a fenced deletion wakes while the term is current", "it bypasses the fence", func(b *broken) {
		b.behindFence(func(*tenure.Term, tenure.Store) func(context.Context, tenure.Key, tenure.WriteCondition) error {
			return b.Mem.DeleteAndWake
		})
	}},
	{"a fenced deletion wakes while the term is current", "it deletes the lease's own object", func(b *broken) {
		b.behindFence(func(term *tenure.Term, fenced tenure.Store) func(context.Context, tenure.Key, tenure.WriteCondition) error {
			return func(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
				if key == term.Key() {
					return b.Mem.DeleteAndWake(ctx, key, cond)
				}
				return fenced.(tenure.Notifier).DeleteAndWake(ctx, key, cond)
			}
		})
	}},
	{"a fenced deletion wakes while the term is current", "the fenced store is not a Watcher", func(b *broken) {
		b.fence = func(guard tenure.Guard) (tenure.Store, error) {
			fenced, err := b.Mem.Fence(guard)
			return struct{ tenure.Store }{fenced}, err
		}
	}},
}

// TestRunFindsEveryBreakage tests the broken stores in a child process, because their
// tests have to fail.
func TestRunFindsEveryBreakage(t *testing.T) {
	testkit.Slow(t)
	const asChild = "STORETEST_AS_CHILD"
	if os.Getenv(asChild) != "" {
		for _, breakage := range breakages {
			t.Run(breakage.rule+"/"+breakage.what, func(t *testing.T) {
				if strings.Contains(breakage.rule, "wakes") || strings.Contains(breakage.rule, "watch") {
					t.Parallel() // each waits until its timeout
				}
				storetest.Run(t, func(t *testing.T) tenure.Store {
					if !strings.HasSuffix(t.Name(), underscored("/"+breakage.rule)) {
						t.Skip("another rule")
					}
					mem := storetest.NewMem()
					b := &broken{
						Mem: mem, get: mem.Get, put: mem.PutIf, del: mem.DeleteIf, list: mem.List, fence: mem.Fence,
						watch: mem.Watch, wake: mem.DeleteAndWake,
					}
					breakage.apply(b)
					return b
				})
			})
		}
		return
	}
	child := exec.Command(os.Args[0], "-test.v", "-test.parallel=100", "-test.run=^"+t.Name()+"$")
	child.Env = append(os.Environ(), asChild+"=1")
	out, _ := child.CombinedOutput()

	unbroken := make(map[string]bool)
	for _, skipped := range regexp.MustCompile(`--- SKIP: .*/(\S+)`).FindAllSubmatch(out, -1) {
		unbroken[string(skipped[1])] = true
	}
	for _, breakage := range breakages {
		rule := underscored(breakage.rule)
		delete(unbroken, rule)
		failure := "--- FAIL: " + t.Name() + "/" + rule + "/" + underscored(breakage.what) + "/" + rule + " "
		if !strings.Contains(string(out), failure) {
			t.Errorf("%s (%s): the rule did not fail", breakage.rule, breakage.what)
		}
	}
	if len(unbroken) != 0 {
		t.Errorf("rules that no breakage covers: %q", slices.Sorted(maps.Keys(unbroken)))
	}
	if got, want := strings.Count(string(out), "The rule: "), len(breakages); got != want {
		t.Errorf("explanations of broken rules: got %d, want %d", got, want)
	}
	if t.Failed() {
		t.Logf("the child's output:\n%s", out)
	}
}

func underscored(name string) string { return strings.ReplaceAll(name, " ", "_") }
