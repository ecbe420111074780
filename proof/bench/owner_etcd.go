package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"
)

var etcdOwnership = ownership{
	name:   "etcd",
	etcd:   true,
	settle: time.Second,
	open: func(ctx context.Context, url string, ttl time.Duration) (owner, error) {
		client, err := etcdClient(url)
		if err != nil {
			return nil, err
		}
		o := &etcdOwner{client: client}
		granted, err := client.Grant(ctx, int64(ttl/time.Second))
		if err != nil {
			client.Close()
			return nil, err
		}
		o.lease = granted.ID
		o.answered.Store(time.Now().UnixNano())
		answers, err := client.KeepAlive(context.WithoutCancel(ctx), o.lease)
		if err != nil {
			client.Close()
			return nil, err
		}
		go func() {
			for range answers { // until the client is closed
				o.answered.Store(time.Now().UnixNano())
			}
		}()
		return o, nil
	},
}

// etcdOwner puts all its keys on one lease, as etcd's users do.
type etcdOwner struct {
	client   *clientv3.Client
	lease    clientv3.LeaseID
	answered atomic.Int64 // when the last renewal was answered, in ns since 1970
}

// Most operations of one transaction that etcd allows by default, and how many are under way.
const (
	etcdBatch   = 128
	etcdWriters = 16
)

// claim puts all keys in batches. If another owner has a key of a batch, claim puts the keys of the
// batch again when they are deleted.
func (o *etcdOwner) claim(ctx context.Context, ids []string) error {
	now, err := o.client.Get(ctx, "claims/", clientv3.WithPrefix(), clientv3.WithLimit(1), clientv3.WithCountOnly())
	if err != nil {
		return err
	}
	var mu sync.Mutex // guards missing
	missing := make(map[string]bool)
	writers, writing := errgroup.WithContext(ctx)
	writers.SetLimit(etcdWriters)
	for batch := range slices.Chunk(ids, etcdBatch) {
		writers.Go(func() error {
			taken, err := o.put(writing, batch)
			if taken || err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			for _, id := range batch {
				missing[id] = true
			}
			return nil
		})
	}
	if err := writers.Wait(); err != nil || len(missing) == 0 {
		return err
	}
	writers, writing = errgroup.WithContext(ctx)
	writers.SetLimit(etcdWriters)
	deleted := o.client.Watch(writing, "claims/", clientv3.WithPrefix(), clientv3.WithRev(now.Header.Revision+1), clientv3.WithFilterPut(), clientv3.WithFragment())
	for len(missing) > 0 {
		answer, ok := <-deleted
		if !ok || answer.Err() != nil {
			return errors.Join(errors.New("the watch ended"), answer.Err(), writers.Wait())
		}
		var free []string
		for _, e := range answer.Events {
			if id := string(e.Kv.Key[len("claims/"):]); missing[id] {
				delete(missing, id)
				free = append(free, id)
			}
		}
		for batch := range slices.Chunk(free, etcdBatch) {
			writers.Go(func() error {
				taken, err := o.put(writing, batch)
				if err == nil && !taken {
					err = errors.New("a third owner has a key")
				}
				return err
			})
		}
	}
	return writers.Wait()
}

// put puts free keys. It reports false, and puts none, if one of them has an owner.
func (o *etcdOwner) put(ctx context.Context, ids []string) (bool, error) {
	var free []clientv3.Cmp
	var puts []clientv3.Op
	for _, id := range ids {
		free = append(free, clientv3.Compare(clientv3.CreateRevision("claims/"+id), "=", 0))
		puts = append(puts, clientv3.OpPut("claims/"+id, "", clientv3.WithLease(o.lease)))
	}
	answer, err := o.client.Txn(ctx).If(free...).Then(puts...).Commit()
	if err != nil {
		return false, err
	}
	return answer.Succeeded, nil
}

func (o *etcdOwner) renewed(context.Context, string) (time.Time, error) {
	return time.Unix(0, o.answered.Load()), nil
}

func (o *etcdOwner) release(ctx context.Context) error {
	_, err := o.client.Revoke(ctx, o.lease)
	return err
}

func (o *etcdOwner) close() { o.client.Close() }

// etcdRevocations measures how fast etcd revokes leases that expire together, each with one key. A
// program that gives each key its own lease waits for that.
func etcdRevocations(ctx context.Context, b *bench, url string) error {
	n := choose(b, 5000, 500)
	client, err := etcdClient(url)
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	deleted := client.Watch(ctx, "leased/", clientv3.WithPrefix(), clientv3.WithFilterPut())
	writing, writingCtx := errgroup.WithContext(ctx)
	writing.SetLimit(etcdWriters)
	for i := range n {
		writing.Go(func() error {
			granted, err := client.Grant(writingCtx, int64(fastTTL/time.Second))
			if err == nil {
				_, err = client.Put(writingCtx, fmt.Sprintf("leased/%d", i), "", clientv3.WithLease(granted.ID))
			}
			return err
		})
	}
	if err := writing.Wait(); err != nil {
		return err
	}
	var first time.Time
	for seen := 0; seen < n; {
		answer, ok := <-deleted
		if !ok || answer.Err() != nil {
			return errors.Join(errors.New("the watch ended"), answer.Err())
		}
		if seen == 0 {
			first = time.Now()
		}
		seen += len(answer.Events)
	}
	b.report.add("claims", "etcd", "expired, a lease each", float64(n)/time.Since(first).Seconds(), "leases/s", n)
	return nil
}
