package main

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// A hand-written election on the clients of etcd and NATS: create a key, wait until
// it is deleted, delete it. Nothing expires.
var (
	etcdHandPeer = peer{
		name:    "etcd-hand",
		about:   "an election by hand on etcd: create a key, watch it, delete it",
		on:      onEtcd,
		settles: 120 * time.Millisecond,
		open: func(_ context.Context, o options) (*replica, error) {
			client, err := etcdClient(o.url)
			if err != nil {
				return nil, err
			}
			return &replica{
				contender: func(lease string) (contender, error) {
					return &handContender{key: &etcdKey{client: client, name: "hand/" + lease}}, nil
				},
				close: func() { client.Close() },
			}, nil
		},
	}
	natsHandPeer = peer{
		name:  "nats-hand",
		about: "an election by hand in a key-value bucket of NATS: create a key, watch it, delete it",
		on:    onNATS,
		open: func(ctx context.Context, o options) (*replica, error) {
			conn, err := nats.Connect(o.url)
			if err != nil {
				return nil, err
			}
			var bucket jetstream.KeyValue
			js, err := jetstream.New(conn)
			if err == nil {
				bucket, err = js.CreateOrUpdateKeyValue(ctx, jetstream.KeyValueConfig{Bucket: "hand", Storage: jetstream.FileStorage})
			}
			if err != nil {
				conn.Close()
				return nil, err
			}
			return &replica{
				contender: func(lease string) (contender, error) {
					return &handContender{key: &natsKey{bucket: bucket, name: lease}}, nil
				},
				close: conn.Close,
			}, nil
		},
	}
)

// key is a key that at most one replica has created.
type key interface {
	create(ctx context.Context) (ok bool, err error)
	// awaitDeleted returns when the key is deleted, or at once if it does not exist.
	awaitDeleted(ctx context.Context) error
	delete(ctx context.Context) error
}

type handContender struct {
	key key
	job running
}

func (c *handContender) campaign(ctx context.Context, job func(context.Context)) error {
	if err := c.acquire(ctx); err != nil {
		return err
	}
	c.job.run(ctx, job)
	return nil
}

func (c *handContender) resign(ctx context.Context) error {
	c.job.stop()
	return c.release(ctx)
}

func (c *handContender) acquire(ctx context.Context) error {
	for {
		ok, err := c.key.create(ctx)
		if ok || err != nil {
			return err
		}
		if err := c.key.awaitDeleted(ctx); err != nil {
			return err
		}
	}
}

func (c *handContender) release(ctx context.Context) error { return c.key.delete(ctx) }

type etcdKey struct {
	client *clientv3.Client
	name   string
	seen   int64 // the revision at which create found the key
}

func (k *etcdKey) create(ctx context.Context) (bool, error) {
	resp, err := k.client.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(k.name), "=", 0)).Then(clientv3.OpPut(k.name, "")).Commit()
	if err != nil {
		return false, err
	}
	k.seen = resp.Header.Revision
	return resp.Succeeded, nil
}

func (k *etcdKey) awaitDeleted(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for resp := range k.client.Watch(ctx, k.name, clientv3.WithRev(k.seen+1), clientv3.WithFilterPut()) {
		if len(resp.Events) > 0 {
			return nil
		}
		if err := resp.Err(); err != nil {
			return err
		}
	}
	return ctx.Err()
}

func (k *etcdKey) delete(ctx context.Context) error {
	_, err := k.client.Delete(ctx, k.name)
	return err
}

type natsKey struct {
	bucket   jetstream.KeyValue
	name     string
	revision uint64 // of the key that this replica has created
	deleted  uint64 // the revision at which the key was deleted
}

func (k *natsKey) create(ctx context.Context) (ok bool, err error) {
	if k.deleted != 0 {
		k.revision, err = k.bucket.Update(ctx, k.name, nil, k.deleted) // in one round trip, instead of three
	} else {
		k.revision, err = k.bucket.Create(ctx, k.name, nil)
	}
	k.deleted = 0
	if errors.Is(err, jetstream.ErrKeyExists) {
		return false, nil
	}
	return err == nil, err
}

func (k *natsKey) awaitDeleted(ctx context.Context) error {
	watcher, err := k.bucket.Watch(ctx, k.name)
	if err != nil {
		return err
	}
	defer watcher.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case entry := <-watcher.Updates():
			if entry != nil && entry.Operation() == jetstream.KeyValueDelete {
				k.deleted = entry.Revision()
				return nil
			}
		}
	}
}

func (k *natsKey) delete(ctx context.Context) error {
	return k.bucket.Delete(ctx, k.name, jetstream.LastRevision(k.revision))
}
