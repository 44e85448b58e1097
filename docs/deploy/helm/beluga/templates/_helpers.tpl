{{- define "beluga.labels" -}}
app.kubernetes.io/name: beluga
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "beluga.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* Paths of the pool, joined by colons. */}}
{{- define "beluga.pool" -}}
{{ join ":" .Values.pool.devices }}
{{- end }}

{{/* Every node has a number of its own. Beluga refuses the second of two with one number, too. */}}
{{- define "beluga.hosts" -}}
{{- $numbers := values .Values.hosts | uniq -}}
{{- if ne (len $numbers) (len .Values.hosts) }}
{{- fail "values: two nodes of hosts have the same number" }}
{{- end }}
{{- range $node, $number := .Values.hosts }}
{{ $node }}: {{ $number | quote }}
{{- end }}
{{- end }}

{{/* The node's number: a shell's first line. A node may lack one: then its pods say so and wait. */}}
{{- define "beluga.host" -}}
host=$(cat "/etc/beluga/hosts/$NODE_NAME") || { echo "$NODE_NAME has no number in hosts" >&2; exit 1; }
{{- end }}

{{- define "beluga.pod" -}}
nodeSelector:
  beluga.io/pool: {{ .Values.pool.name }}
# The server watches its clients by pidfds, and successors of a server need the processes' numbers
# to prove that an engine whose GPU or DSA writes to the pool has ended. Both hold across pid
# namespaces only in part: before Linux 6.5 not at all, and never for a successor. What cannot be
# proven stays quarantined until the node boots again. So all of them have the node's processes.
hostPID: true
{{- end }}

{{- define "beluga.env" -}}
- name: BELUGA_POOL
  value: {{ include "beluga.pool" . }}
- name: BELUGA_RUNTIME_DIR
  value: /run/beluga
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
{{- end }}

{{- define "beluga.security" -}}
runAsUser: 0
{{- if and (eq .Values.pool.memory "devdax") (not .Values.pool.deviceResource) }}
privileged: true
{{- else }}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL], add: [IPC_LOCK]}
{{- end }}
{{- end }}

{{- define "beluga.mounts" -}}
- {name: hosts, mountPath: /etc/beluga/hosts, readOnly: true}
- {name: run, mountPath: /run/beluga}
{{- if eq .Values.pool.memory "emulated" }}
- {name: memory, mountPath: {{ .Values.pool.directory }}}
{{- else if not .Values.pool.deviceResource }}
{{- range $i, $device := .Values.pool.devices }}
- {name: device-{{ $i }}, mountPath: {{ $device }}}
{{- end }}
{{- end }}
{{- end }}

{{- define "beluga.volumes" -}}
- name: hosts
  configMap: {name: beluga-hosts}
# Lock files and sockets by which the processes of a node know each other: one directory for all of
# them, which outlives every pod.
- name: run
  hostPath: {path: /run/beluga, type: DirectoryOrCreate}
{{- if eq .Values.pool.memory "emulated" }}
- name: memory
  hostPath: {path: {{ .Values.pool.directory }}, type: DirectoryOrCreate}
{{- else if not .Values.pool.deviceResource }}
{{- range $i, $device := .Values.pool.devices }}
- name: device-{{ $i }}
  hostPath: {path: {{ $device }}, type: CharDevice}
{{- end }}
{{- end }}
{{- end }}

{{/* Resources, with the device plugin's. */}}
{{- define "beluga.resources" -}}
{{- $resources := deepCopy (index . 1) -}}
{{- $device := (index . 0).Values.pool.deviceResource -}}
{{- if $device }}
{{- $resources = mergeOverwrite $resources (dict "limits" (dict $device 1)) }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{/* Does this node reach the pool's server? */}}
{{- define "beluga.reaches" -}}
exec:
  command:
    - /bin/sh
    - -c
    - exec beluga ping --host "$(cat "/etc/beluga/hosts/$NODE_NAME")" --count 1 --timeout 2
periodSeconds: 30
timeoutSeconds: 10
{{- end }}
