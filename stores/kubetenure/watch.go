package kubetenure

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
)

// Watch subscribes to the changes of an object. All subscriptions to one object share a watch of the
// API. Watch itself does no I/O.
func (s *Store) Watch(key tenure.Key) tenure.Subscription { return s.watches.Watch(key) }

var (
	errEra  = errors.New("the API server is older than before")
	errLags = errors.New("the watch lags behind")
)

// follow watches an object and reports its changes until the watch ends.
func (s *Store) follow(ctx context.Context, key tenure.Key, tell func(tenure.Change)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	var lags sync.WaitGroup
	defer lags.Wait()
	defer cancel(nil)
	s.mu.Lock()
	stop := context.AfterFunc(s.era, func() { cancel(errEra) })
	s.mu.Unlock()
	defer stop()

	query := url.Values{"fieldSelector": {"metadata.name=" + s.name(key)}}
	var list leaseList
	limited, done := context.WithTimeout(ctx, requestTimeout)
	err := s.client.send(limited, http.MethodGet, "", query, nil, &list)
	done()
	if err != nil {
		return err
	}
	t := &teller{store: s, key: key, tell: tell}
	if len(list.Items) == 0 {
		tell(tenure.Change{Object: tenure.Object{Key: key}, Deleted: true, Arrived: time.Now()})
	} else if err := t.told(list.Items[0], false); err != nil {
		return err
	}
	query.Set("watch", "1")
	query.Set("allowWatchBookmarks", "true")
	query.Set("resourceVersion", list.Metadata.ResourceVersion)
	late := time.AfterFunc(requestTimeout, func() { cancel(errLags) })
	_, resp, err := s.client.once(ctx, http.MethodGet, "", query, nil, "")
	if !late.Stop() && err == nil {
		err = errLags
	}
	if err != nil {
		return ended(ctx, err)
	}
	defer resp.Body.Close()
	lags.Go(func() { t.awaitLag(ctx, cancel) })
	for events := json.NewDecoder(resp.Body); ; {
		var e struct {
			Type   string          `json:"type"`
			Object json.RawMessage `json:"object"`
		}
		if err := events.Decode(&e); err != nil {
			return ended(ctx, err)
		}
		switch e.Type {
		case "BOOKMARK":
		case "ADDED", "MODIFIED", "DELETED":
			var l lease
			if err := json.Unmarshal(e.Object, &l); err != nil {
				return err
			}
			if err := t.told(l, e.Type == "DELETED"); err != nil {
				return err
			}
		default:
			return fmt.Errorf("the watch has ended: %s %s", e.Type, e.Object)
		}
	}
}

// ended returns the cause of ctx, or err if ctx is not done.
func ended(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return err
}

// teller passes the changes of a Lease on to its subscribers.
type teller struct {
	store *Store
	key   tenure.Key
	tell  func(tenure.Change)

	mu sync.Mutex
	at int64 // the newest version in the watch so far
}

func (t *teller) told(l lease, gone bool) error {
	is, err := decode(t.key, l)
	if err != nil {
		return err
	}
	t.mu.Lock()
	t.at = is.at
	t.mu.Unlock()
	change := tenure.Change{Object: is.tenureObject(t.key), Arrived: time.Now()}
	if gone || is.version() == 0 {
		change.Object, change.Deleted = tenure.Object{Key: t.key, Version: is.at}, true
	}
	if gone {
		t.store.doubt(t.key)
	} else {
		t.store.saw(t.key, nil, is)
	}
	t.tell(change)
	return nil
}

// awaitLag ends a watch that lags for too long behind a version that this process knows: the API
// server may have lost its connection to etcd.
func (t *teller) awaitLag(ctx context.Context, end context.CancelCauseFunc) {
	const longest = 2500 * time.Millisecond
	var missing int64
	var since time.Time
	look := time.NewTicker(longest / 5)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-look.C:
		}
		t.mu.Lock()
		at := t.at
		t.mu.Unlock()
		known := t.store.recall(t.key)
		switch {
		case known == nil || known.at <= at:
			missing = 0
		case missing == 0 || at >= missing:
			missing, since = known.at, time.Now()
		case time.Since(since) >= longest:
			t.store.client.leave()
			end(errLags)
			return
		}
	}
}
