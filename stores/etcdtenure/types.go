package etcdtenure

import (
	"context"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storekit"
)

// Types returns at most limit types of the objects in the store, in the order of etcd's keys. It makes
// one request for each type, which reads one key, however many objects there are. It is safe for
// concurrent use.
func (s *Store) Types(ctx context.Context, limit int) (types []string, err error) {
	defer storekit.OpError(ctx, &err, "etcdtenure: list", "types")
	ctx, cancel := storekit.WithLimit(ctx, requestTimeout)
	defer cancel()
	prefix := s.cfg.Prefix + ofObjects
	from, end := prefix, clientv3.GetPrefixRangeEnd(prefix)
	for len(types) < limit {
		_, resp, err := s.look(ctx, clientv3.OpGet(from, clientv3.WithRange(end), clientv3.WithLimit(1), clientv3.WithKeysOnly()))
		if err != nil {
			return nil, err
		}
		kvs := resp.Responses[0].GetResponseRange().Kvs
		if len(kvs) == 0 {
			break
		}
		found := string(kvs[0].Key)
		escaped, _, ok := strings.Cut(strings.TrimPrefix(found, prefix), "/")
		if !ok { // other programs may write anything
			from = found + "\x00"
			continue
		}
		var key tenure.Key
		_ = key.UnmarshalText([]byte(escaped + "/")) // it has a slash, so there is no error
		types = append(types, key.Type)
		from = clientv3.GetPrefixRangeEnd(prefix + escaped + "/")
	}
	return types, nil
}
