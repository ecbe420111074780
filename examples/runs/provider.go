package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"sync"
)

// provider stands for another system, which charges and ships. PUT makes a call, and GET says
// whether the call was made. A call that is made twice with the same key has one effect.
type provider struct {
	mu    sync.Mutex
	calls map[string]int // by key
}

func newProvider() *provider { return &provider{calls: make(map[string]int)} }

func (p *provider) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	defer p.mu.Unlock()
	key := r.URL.Path
	if r.Method == http.MethodPut {
		p.calls[key]++
	}
	if p.calls[key] == 0 {
		http.NotFound(w, r)
		return
	}
	fmt.Fprintf(w, "%s is done", key)
}

// call makes a call.
func call(ctx context.Context, provider, key string) (outcome string, err error) {
	outcome, made, err := ask(ctx, http.MethodPut, provider, key)
	if err == nil && !made {
		err = fmt.Errorf("the provider does not know %s", key)
	}
	return outcome, err
}

// find reports whether a call was made, and its outcome.
func find(ctx context.Context, provider, key string) (outcome string, made bool, err error) {
	return ask(ctx, http.MethodGet, provider, key)
}

func ask(ctx context.Context, method, provider, key string) (outcome string, made bool, err error) {
	request, err := http.NewRequestWithContext(ctx, method, "http://"+provider+"/"+url.PathEscape(key), nil)
	if err != nil {
		return "", false, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return "", false, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	switch {
	case err != nil:
		return "", false, err
	case response.StatusCode == http.StatusNotFound:
		return "", false, nil
	case response.StatusCode != http.StatusOK:
		return "", false, fmt.Errorf("%s %s: %s", method, key, response.Status)
	}
	return string(body), true, nil
}
