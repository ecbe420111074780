package main

import (
	"context"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"
)

var etcdPeer = peer{
	name:  "etcd",
	about: "concurrency.Election of etcd, one node, on disk",
	on:    onEtcd,
	// The server picks up a new watch of past events within 100 ms.
	settles: 120 * time.Millisecond,
	expires: true,
	open: func(ctx context.Context, o options) (*replica, error) {
		client, err := etcdClient(o.url)
		if err != nil {
			return nil, err
		}
		var opts []concurrency.SessionOption
		switch o.timing {
		case fast:
			opts = append(opts, concurrency.WithTTL(3))
		case endless:
			opts = append(opts, concurrency.WithTTL(3600))
		}
		session, err := concurrency.NewSession(client, opts...)
		if err != nil {
			client.Close()
			return nil, err
		}
		return &replica{
			contender: func(lease string) (contender, error) {
				return &etcdContender{client: client, session: session, name: o.name, election: concurrency.NewElection(session, lease)}, nil
			},
			close: func() {
				session.Orphan() // its lease is not revoked: behind a proxy that drops everything there would be no answer
				client.Close()
			},
		}, nil
	},
}

func etcdClient(url string) (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{Endpoints: []string{url}, DialTimeout: 5 * time.Second, Logger: zap.NewNop()})
}

type etcdContender struct {
	client   *clientv3.Client
	session  *concurrency.Session // on which all leases of its replica depend
	name     string
	election *concurrency.Election
	job      running
}

func (c *etcdContender) campaign(ctx context.Context, job func(context.Context)) error {
	if err := c.acquire(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// Only the session reports its end.
	defer context.AfterFunc(c.session.Ctx(), cancel)()
	c.job.run(ctx, job)
	return nil
}

func (c *etcdContender) resign(ctx context.Context) error {
	c.job.stop()
	return c.release(ctx)
}

func (c *etcdContender) acquire(ctx context.Context) error {
	return c.election.Campaign(ctx, c.name)
}

func (c *etcdContender) renew(ctx context.Context) error {
	_, err := c.client.KeepAliveOnce(ctx, c.session.Lease())
	return err
}

func (c *etcdContender) release(ctx context.Context) error { return c.election.Resign(ctx) }
